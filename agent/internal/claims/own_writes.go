package claims

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ownWritesKept is how long the caches may lag behind what this process wrote. One that lags longer costs a look at the API server. It also
// bounds for how long a hub is misjudged that was restored, and counts its resource versions from an earlier one again.
const ownWritesKept = 5 * time.Second

// ownWrites are MachineDeployments, claims and Machines as this process wrote them, until the caches show them: without them each write would
// look, for a moment, as if it were still to be done. They are read only.
type ownWrites struct{ objects *utilcache.Expiring }

type identity struct {
	name types.NamespacedName
	uid  types.UID
}

func newOwnWrites(c clock.Clock) ownWrites {
	return ownWrites{objects: utilcache.NewExpiringWithClock(c)}
}

func identityOf(object client.Object) identity {
	return identity{client.ObjectKeyFromObject(object), object.GetUID()}
}

// note keeps an object as the API server returned it. It must not be changed any more.
func (w ownWrites) note(object client.Object) {
	w.objects.Set(identityOf(object), object, ownWritesKept)
}

// has reports whether an object is one that this process wrote itself, and not one that a cache shows.
func (w ownWrites) has(object client.Object) bool {
	kept, is := w.objects.Get(identityOf(object))
	return is && kept == object
}

// over returns what this process wrote of an object that a cache shows, if that is newer.
func over[T client.Object](shown T, w ownWrites) T {
	kept, _ := w.objects.Get(identityOf(shown))
	written, is := kept.(T)
	if !is {
		return shown
	}
	order, err := resourceversion.CompareResourceVersion(written.GetResourceVersion(), shown.GetResourceVersion())
	if err != nil || order <= 0 {
		w.objects.Delete(identityOf(shown))
		return shown
	}
	return written
}
