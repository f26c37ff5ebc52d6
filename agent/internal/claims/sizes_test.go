package claims

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// A user may set a size at any time, even between an agent's read and its write.
func TestReplicasAreNotWrittenOverASizeThatWasSetMeanwhile(t *testing.T) {
	for name, test := range map[string]struct {
		key      string
		replicas int32 // decided by the agent; there are 2
		size     string
	}{
		"the max size is lowered":     {clusterv1.AutoscalerMaxSizeAnnotation, 3, "2"},
		"the max size cannot be read": {clusterv1.AutoscalerMaxSizeAnnotation, 3, "many"},
		"the min size is raised":      {clusterv1.AutoscalerMinSizeAnnotation, 1, "2"},
	} {
		for _, before := range []string{"", "3"} {
			t.Run(name+", it was "+before, func(t *testing.T) {
				annotations := map[string]string{v1alpha1.LedgerAnnotation: restingLedger(2).Encode()}
				if before != "" {
					annotations[test.key] = before
				}
				e := engineWith(t, groupOf("small", 2, annotations))
				write := func() error {
					s, err := e.read(t.Context(), uncached, smallKey)
					require.NoError(t, err)
					d := &protocol.Decision{Ledger: s.Ledger.Clone(), Replicas: test.replicas}
					var md clusterv1.MachineDeployment
					require.NoError(t, e.Client.Get(t.Context(), smallKey, &md))
					if now := md.DeepCopy(); md.Annotations[test.key] != test.size {
						now.Annotations[test.key] = test.size
						require.NoError(t, e.Client.Patch(t.Context(), now, client.MergeFrom(&md)))
					}
					_, err = e.writeLedger(t.Context(), s, d)
					return err
				}
				require.Error(t, write())
				md, _ := small(t, e)
				assert.Equal(t, int32(2), *md.Spec.Replicas)
				require.NoError(t, write(), "nothing has changed since it was read")
			})
		}
	}
}
