package agent_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	eventsv1 "k8s.io/api/events/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// confidential is what the hub's policies of these tests say.
const confidential = "see https://policies.internal.example/account/1234"

// refusing denies a kind of write in one namespace.
func refusing(t *testing.T, namespace, group, version, resource, operation string) {
	t.Helper()
	name := namespace + "." + resource
	policy := fmt.Sprintf(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: %[1]q}
spec:
  matchConstraints:
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %[2]q}}
    resourceRules: [{apiGroups: [%[3]q], apiVersions: [%[4]q], operations: [%[5]s], resources: [%[6]q]}]
  matchConditions: [{name: agent, expression: "request.userInfo.username == '%[7]s'"}]
  validations: [{expression: "false", message: %[8]q}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: %[1]q}
spec: {policyName: %[1]q, validationActions: [Deny]}
`, name, namespace, group, version, operation, resource, account, confidential)
	require.NoError(t, apply(t.Context(), plane, []byte(policy), name))
}

// kept collects what an agent logs.
type kept struct {
	mu   sync.Mutex
	text strings.Builder
}

func (k *kept) add(_, arguments string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.text.WriteString(arguments + "\n")
}

func (k *kept) String() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.text.String()
}

// What a policy says is for the hub's users, who find it in events and in the agent's log.
func TestTheWordsOfThePolicyThatRefusesStayInTheHub(t *testing.T) {
	for name, c := range map[string]struct {
		group, version, resource, operation string
		// eventOn is the kind of the object that has the event.
		eventOn string
		reason  agenterrors.Reason
	}{
		"the claim's object": {v1alpha1.Group, "v1alpha1", "machineclaims", "CREATE", "Cluster", agenterrors.ReasonWriteRefused},
		"the ledger":         {"cluster.x-k8s.io", "*", "machinedeployments", "UPDATE", "MachineDeployment", agenterrors.ReasonNotOpen},
	} {
		t.Run(name, func(t *testing.T) {
			namespace, log := plane.Namespace(t), &kept{}
			plane.Create(t, capitest.NewCluster(namespace, "spoke"), capitest.NewMachineDeployment(namespace, "small", "spoke", 0))
			refusing(t, namespace, c.group, c.version, c.resource, c.operation)
			r := start(t, agent.Config{Options: testOptions(namespace), Log: funcr.New(log.add, funcr.Options{})})
			create := func(id string) error {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				_, err := r.client(namespace, "spoke").Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
					Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"}, ClaimId: id, Holder: "karpenter",
					Candidates: []string{namespace + "/small"},
				})
				return err
			}
			// The API server learns of a policy after a while.
			tries := 0
			var refused error
			require.Eventually(t, func() bool {
				tries++
				refused = create(fmt.Sprintf("claim-%d", tries))
				return refused != nil
			}, patience, 100*time.Millisecond)
			require.Equal(t, codes.FailedPrecondition, status.Code(refused), "%v", refused)
			require.Equal(t, c.reason, agenterrors.ReasonOf(refused))
			require.Contains(t, refused.Error(), "the hub refuses ")
			told := refused.Error() + fmt.Sprint(status.Convert(refused).Details()...)
			require.NotContains(t, told, "internal.example")
			require.NotContains(t, told, "ValidatingAdmissionPolicy")
			require.False(t, agenterrors.IsUnavailable(refused))

			require.EventuallyWithT(t, func(collect *assert.CollectT) {
				var events eventsv1.EventList
				assert.NoError(collect, plane.Client.List(t.Context(), &events, client.InNamespace(namespace)))
				assert.True(collect, slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
					return e.Regarding.Kind == c.eventOn && e.Reason == "WriteRefused" && strings.Contains(e.Note, confidential)
				}), "%s", events.Items)
			}, patience, 50*time.Millisecond)
			require.Contains(t, log.String(), confidential)
		})
	}
}
