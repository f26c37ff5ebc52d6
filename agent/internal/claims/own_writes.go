package claims

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ownWritesKept is how long the caches may lag behind what this process wrote. One that lags longer costs a look at the API server.
const ownWritesKept = 5 * time.Second

// ownWrites are claims and Machines as this process wrote them, until the caches show them: without them each write would look, for a moment,
// as if it were still to be done. They are read only.
type ownWrites struct {
	objects *utilcache.Expiring // by UID
}

func newOwnWrites(c clock.Clock) ownWrites {
	return ownWrites{objects: utilcache.NewExpiringWithClock(c)}
}

// note keeps an object as the API server returned it. It must not be changed any more.
func (w ownWrites) note(object client.Object) { w.objects.Set(object.GetUID(), object, ownWritesKept) }

// drop forgets an object.
func (w ownWrites) drop(uid types.UID) { w.objects.Delete(uid) }

// newest returns what this process wrote of an object that a cache shows, if that is newer.
func newest[T client.Object](w ownWrites, shown T) T {
	kept, is := w.objects.Get(shown.GetUID())
	if !is {
		return shown
	}
	written, is := kept.(T)
	if !is {
		return shown
	}
	order, err := resourceversion.CompareResourceVersion(written.GetResourceVersion(), shown.GetResourceVersion())
	if err != nil || order <= 0 {
		w.drop(shown.GetUID())
		return shown
	}
	return written
}
