package claims

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ownWritesKept is how long the caches may lag behind this process's writes. A cache that lags
// longer costs a read from the API server. It also bounds how long the agent misjudges a hub that
// was restored and whose resource versions have started over from an earlier one.
const ownWritesKept = 5 * time.Second

// ownWrites holds MachineDeployments, claims and Machines as this process wrote them, until the
// caches show them. Without them each write would briefly look as if it were still to be done. The
// objects are read-only.
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

// note keeps an object as the API server returned it. The caller must not change it any more.
func (w ownWrites) note(object client.Object) {
	w.objects.Set(identityOf(object), object, ownWritesKept)
}

// has reports whether an object is one that this process wrote itself, rather than one from a
// cache.
func (w ownWrites) has(object client.Object) bool {
	kept, is := w.objects.Get(identityOf(object))
	return is && kept == object
}

// over returns this process's version of an object from a cache, if that is newer, else the cached
// one.
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
