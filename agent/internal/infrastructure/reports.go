package infrastructure

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

const (
	// readsAtOnce limits concurrent reads of reports, and readWithin the duration of each: many
	// Machines of a group may have to be checked.
	readsAtOnce = 8
	readWithin  = 10 * time.Second
)

// Reports provides the conditions of Machines' infrastructure objects, for cases where their Ready
// condition is not specific enough. The objects are not watched, because they are many and only a
// few are needed. It is safe for concurrent use.
type Reports struct {
	reader client.Reader
	clock  clock.Clock
	known  *cache.Expiring // reportKey to readReport
	kinds  *cache.Expiring // schema.GroupKind to schema.GroupVersionKind
	logged *cache.Expiring // group kinds with a recently logged read error
	calls  singleflight.Group
	turns  *semaphore.Weighted
}

// NewReports returns reports that are read from the API server.
func NewReports(reader client.Reader, clk clock.Clock) *Reports {
	fresh := func() *cache.Expiring { return cache.NewExpiringWithClock(clk) }
	return &Reports{reader: reader, clock: clk, known: fresh(), kinds: fresh(), logged: fresh(), turns: semaphore.NewWeighted(readsAtOnce)}
}

type reportKey struct {
	machine   types.UID
	condition string
}

type readReport struct {
	protocol.Report

	at time.Time
}

// Of returns the reason and the message of a condition of the Machine's infrastructure object, as
// last read. They are empty if the object has no such condition with status False, or cannot be
// read. known is false if the object has not been read yet. Of never blocks: a report older than
// [protocol.ReportLife] is stale, and is read again in the background.
func (r *Reports) Of(ctx context.Context, m *clusterv1.Machine, condition string) (report protocol.Report, known bool) {
	key := reportKey{m.UID, condition}
	value, known := r.known.Get(key)
	last, _ := value.(readReport)
	if !known || r.clock.Since(last.at) >= protocol.ReportLife {
		last.Stale = known
		r.begin(ctx, m.Namespace, m.Spec.InfrastructureRef, key)
	}
	return last.Report, known
}

// begin reads the report in the background, after those that are waiting. It does nothing if the
// same read is in flight.
func (r *Reports) begin(ctx context.Context, namespace string, ref clusterv1.ContractVersionedObjectReference, key reportKey) {
	// Others wait for the turn of this read, so it must not wait for the limits of a call that
	// asked for it.
	ctx = log.IntoContext(context.Background(), log.FromContext(ctx))
	r.calls.DoChan(string(key.machine)+"/"+key.condition, func() (any, error) {
		if err := r.turns.Acquire(ctx, 1); err != nil {
			return nil, err // not expected: ctx does not end
		}
		defer r.turns.Release(1)
		ctx, cancel := context.WithTimeout(ctx, readWithin)
		defer cancel()
		report, err := r.read(ctx, namespace, ref, key.condition)
		if err != nil {
			r.logUnreadable(ctx, ref, err)
		}
		r.known.Set(key, readReport{report, r.clock.Now()}, 10*protocol.ReportLife)
		return nil, nil //nolint:nilnil // it is in known
	})
}

// logUnreadable logs that a kind cannot be read, at most once an hour.
func (r *Reports) logUnreadable(ctx context.Context, ref clusterv1.ContractVersionedObjectReference, cause error) {
	kind := schema.GroupKind{Group: ref.APIGroup, Kind: ref.Kind}
	if _, logged := r.logged.Get(kind); logged {
		return
	}
	r.logged.Set(kind, true, time.Hour)
	log.FromContext(ctx).Info("infrastructure objects of a kind cannot be read, so only deadlines detect failures of their Machines",
		"kind", ref.Kind, "name", ref.Name, "cause", cause.Error())
}

func (r *Reports) read(
	ctx context.Context, namespace string, ref clusterv1.ContractVersionedObjectReference, condition string,
) (protocol.Report, error) {
	gvk, err := r.kind(ctx, schema.GroupKind{Group: ref.APIGroup, Kind: ref.Kind})
	if err != nil {
		return protocol.Report{}, err
	}
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(gvk)
	key := types.NamespacedName{Namespace: namespace, Name: ref.Name}
	if err := r.reader.Get(ctx, key, object); err != nil {
		return protocol.Report{}, fmt.Errorf("reading %s %s: %w", ref.Kind, key, err)
	}
	// Both lists are read: a provider may write the newer one, but with only some of its
	// conditions.
	for _, path := range [][]string{{"status", "v1beta2", "conditions"}, {"status", "conditions"}} {
		conditions, _, _ := unstructured.NestedSlice(object.Object, path...) // a list in another format is treated as empty
		for _, each := range conditions {
			fields, _ := each.(map[string]any)
			text := func(field string) string {
				value, _ := fields[field].(string)
				return value
			}
			if text("type") == condition && text("status") == "False" {
				return protocol.Report{Reason: text("reason"), Message: text("message")}, nil
			}
		}
	}
	return protocol.Report{}, nil
}

func (r *Reports) kind(ctx context.Context, gk schema.GroupKind) (schema.GroupVersionKind, error) {
	if known, ok := r.kinds.Get(gk); ok {
		gvk, _ := known.(schema.GroupVersionKind)
		return gvk, nil
	}
	gvk, err := resolve(ctx, r.reader, gk)
	if err == nil {
		r.kinds.Set(gk, gvk, kindLife)
	}
	return gvk, err
}
