package adoption_test

import (
	"context"
	"testing"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/apiservertest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/karpenter/pkg/apis"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

var nodeClaims = schema.GroupResource{Group: apis.Group, Resource: "nodeclaims"}

// refusing makes the fake API server refuse the NodeClaims for which admit returns an error.
func refusing(admit func(context.Context, *karpv1.NodeClaim) error) interceptor.Funcs {
	return interceptor.Funcs{
		Create: func(ctx context.Context, kube client.WithWatch, object client.Object, options ...client.CreateOption) error {
			if nodeClaim, is := object.(*karpv1.NodeClaim); is {
				if err := admit(ctx, nodeClaim.DeepCopy()); err != nil {
					return err
				}
			}
			return kube.Create(ctx, object, options...)
		},
	}
}

func TestTheAPIServerAcceptsTheNodeClaimOfANode(t *testing.T) {
	server := apiservertest.Start(t, "shim").Client
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll}, refusing(func(ctx context.Context, nodeClaim *karpv1.NodeClaim) error {
		return server.Create(ctx, nodeClaim, client.DryRunAll)
	}))
	e.pool.Spec.Template.Labels = map[string]string{"added": "by-core"}
	e.pool.Spec.Template.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{
		{Key: corev1.LabelInstanceTypeStable, Operator: corev1.NodeSelectorOpExists, MinValues: new(2)},
		{Key: "team", Operator: corev1.NodeSelectorOpIn, Values: []string{"blue", "red"}, MinValues: new(2)},
		{Key: "own", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"other"}},
	}
	e.Update(e.pool)
	plan := e.plan()
	assert.Empty(t, plan.InTheWay)
	assert.Len(t, plan.Nodes, 1)
	nodeClaim := e.look()
	require.NotNil(t, nodeClaim)
	assert.Equal(t, []string{"MachineAdopted"}, e.Recorder.Reasons())
}

func TestANodeWhoseNodeClaimIsRefusedIsNotChanged(t *testing.T) {
	var answer error = apierrors.NewForbidden(nodeClaims, "x", assert.AnError)
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll, NodesPerMinute: new(int32(1))},
		refusing(func(context.Context, *karpv1.NodeClaim) error { return answer }))
	was := e.node.DeepCopy()
	assert.Nil(t, e.look())
	assert.Equal(t, was.ObjectMeta, e.node.ObjectMeta)
	require.Equal(t, []string{"MachineNotAdopted"}, e.Recorder.Reasons())
	assert.Contains(t, e.Recorder.Messages()[0], assert.AnError.Error())
	plan := e.plan()
	assert.Empty(t, plan.Nodes)
	require.Len(t, plan.InTheWay, 1)
	assert.Contains(t, plan.InTheWay[0].Message, assert.AnError.Error())

	answer = nil
	assert.NotNil(t, e.look(), "within the same minute, as it took no turn")
}

func TestANodeClaimOfTheSameNameIsNotReportedAsANodesAdoption(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll}, refusing(func(_ context.Context, nodeClaim *karpv1.NodeClaim) error {
		return apierrors.NewAlreadyExists(nodeClaims, nodeClaim.Name)
	}))
	assert.Nil(t, e.look())
	assert.Empty(t, e.Recorder.Reasons())
	assert.NotContains(t, e.node.Labels, v1alpha1.AdoptedLabel)
}
