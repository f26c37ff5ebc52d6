package infrastructure

import (
	"context"
	"fmt"
	"time"

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

// Reports reads what infrastructure objects of Machines say, where their condition Ready does not say it. Nothing is watched, as there are many of
// them and few have to be looked at. It is safe for concurrent use.
type Reports struct {
	reader client.Reader
	known  *cache.Expiring // of keys: a report, or the error that stands for none
	kinds  *cache.Expiring // of group kinds
}

// NewReports returns reports that are read from the API server.
func NewReports(reader client.Reader, clk clock.Clock) *Reports {
	return &Reports{reader: reader, known: cache.NewExpiringWithClock(clk), kinds: cache.NewExpiringWithClock(clk)}
}

type reportKey struct {
	machine   types.UID
	condition string
}

// Of returns the reason and the message of a condition of the Machine's infrastructure object, as they were at most [protocol.ReportLife] ago; none
// if the object has no such condition that is False, or cannot be read.
func (r *Reports) Of(ctx context.Context, m *clusterv1.Machine, condition string) protocol.Report {
	key := reportKey{m.UID, condition}
	if known, ok := r.known.Get(key); ok {
		report, _ := known.(protocol.Report)
		return report
	}
	report, err := r.read(ctx, m, condition)
	if err != nil {
		ref := m.Spec.InfrastructureRef
		log.FromContext(ctx).Info("what an infrastructure object reports is not known", "kind", ref.Kind, "name", ref.Name, "cause", err.Error())
	}
	if ctx.Err() == nil {
		r.known.Set(key, report, protocol.ReportLife-time.Second) // so that it is read anew when it is looked at again
	}
	return report
}

func (r *Reports) read(ctx context.Context, m *clusterv1.Machine, condition string) (protocol.Report, error) {
	ref := m.Spec.InfrastructureRef
	gvk, err := r.kind(ctx, schema.GroupKind{Group: ref.APIGroup, Kind: ref.Kind})
	if err != nil {
		return protocol.Report{}, err
	}
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(gvk)
	key := types.NamespacedName{Namespace: m.Namespace, Name: ref.Name}
	if err := r.reader.Get(ctx, key, object); err != nil {
		return protocol.Report{}, fmt.Errorf("reading %s %s: %w", ref.Kind, key, err)
	}
	for _, path := range [][]string{{"status", "v1beta2", "conditions"}, {"status", "conditions"}} {
		conditions, _, _ := unstructured.NestedSlice(object.Object, path...) // a list of another form has none
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
