package owners_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/owners"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

const providerID = "sim:///1"

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func nodeClaim(name string, age time.Duration, changes ...func(*karpv1.NodeClaim)) *karpv1.NodeClaim {
	nc := &karpv1.NodeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(epoch.Add(-age))},
		Status:     karpv1.NodeClaimStatus{ProviderID: providerID},
	}
	for _, change := range changes {
		change(nc)
	}
	return nc
}

func registered(nc *karpv1.NodeClaim) { nc.StatusConditions().SetTrue(karpv1.ConditionTypeRegistered) }

func deleted(nc *karpv1.NodeClaim) {
	nc.DeletionTimestamp, nc.Finalizers = &metav1.Time{Time: epoch}, []string{karpv1.TerminationFinalizer}
}

func TestOneNodeClaimHasTheMachine(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", OwnerReferences: []metav1.OwnerReference{{Name: "has", UID: "has"}}}}
	node.Spec.ProviderID = providerID
	for name, tc := range map[string]struct {
		has, other *karpv1.NodeClaim
		node       *corev1.Node
	}{
		"the Node's": {
			has: nodeClaim("has", time.Hour, deleted), other: nodeClaim("other", 2*time.Hour, registered), node: node,
		},
		"a registered one": {has: nodeClaim("has", time.Hour, registered, deleted), other: nodeClaim("other", 2*time.Hour)},
		// Otherwise the end of the deleted one would remove the Machine of the one that stays.
		"one that is not being deleted": {has: nodeClaim("has", time.Hour), other: nodeClaim("other", 2*time.Hour, deleted)},
		"the oldest":                    {has: nodeClaim("has", 2*time.Hour), other: nodeClaim("other", time.Hour)},
		"the first by UID":              {has: nodeClaim("has", time.Hour), other: nodeClaim("other", time.Hour)},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, "has", owners.Rightful([]*karpv1.NodeClaim{tc.has, tc.other}, tc.node).Name)
			assert.Equal(t, "has", owners.Rightful([]*karpv1.NodeClaim{tc.other, tc.has}, tc.node).Name)

			kube := shimtest.FakeKube(interceptor.Funcs{})
			for _, nc := range []*karpv1.NodeClaim{tc.has, tc.other} {
				stored := nc.DeepCopy()
				stored.DeletionTimestamp = nil
				require.NoError(t, kube.Create(t.Context(), stored))
				if nc.DeletionTimestamp != nil {
					require.NoError(t, kube.Delete(t.Context(), stored))
				}
			}
			if tc.node != nil {
				require.NoError(t, kube.Create(t.Context(), tc.node.DeepCopy()))
			}
			for _, asking := range []*karpv1.NodeClaim{tc.has, tc.other} {
				owner, err := owners.Of(t.Context(), kube, asking)
				require.NoError(t, err)
				assert.Equal(t, "has", owner.Name, "asked by %s", asking.Name)
			}
		})
	}
}

func TestANodeClaimWithoutAProviderIDSharesNone(t *testing.T) {
	kube := shimtest.FakeKube(interceptor.Funcs{})
	for _, name := range []string{"one", "two"} {
		nc := nodeClaim(name, time.Hour)
		nc.Status.ProviderID = ""
		require.NoError(t, kube.Create(t.Context(), nc))
		others, err := owners.Others(t.Context(), kube, nc, "")
		require.NoError(t, err)
		assert.Empty(t, others)
		owner, err := owners.Of(t.Context(), kube, nc)
		require.NoError(t, err)
		assert.Equal(t, name, owner.Name)
	}
}
