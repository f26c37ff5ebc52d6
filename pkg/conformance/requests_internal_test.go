package conformance

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// The name of a Cluster may be a word of the message.
func TestMessagesThatDifferInTheClusterAloneAreTheSame(t *testing.T) {
	existing := &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "call"}
	absent := &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "no-such-cluster"}
	for _, format := range []func(cluster *agentv1alpha1.ClusterRef) error{
		func(*agentv1alpha1.ClusterRef) error {
			return agenterrors.PermissionDenied("this identity may not call this method for this Cluster")
		},
		func(cluster *agentv1alpha1.ClusterRef) error {
			return agenterrors.PermissionDenied("this identity may not call it for " + cluster.GetName())
		},
	} {
		assert.Equal(t, anonymous(format(existing), existing, absent), anonymous(format(absent), existing, absent))
	}
	assert.NotEqual(t, anonymous(agenterrors.PermissionDenied("it does not exist"), existing, absent),
		anonymous(agenterrors.PermissionDenied("it may not"), existing, absent))
}
