package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	eventsv1 "k8s.io/api/events/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
)

const capacityPrefix = "metadata.annotations[capacity.cluster-autoscaler.kubernetes.io/"

func TestBadDescriptionsOfNodeGroupsAreReportedAndDoNotAffectOthers(t *testing.T) {
	shows(t, "bad descriptions are reported where the user looks, and do not affect other node groups")
	leaveAsFound(t)
	apply(t, w.Hub, manifests.FleetHub, manifests.BrokenHub)
	apply(t, w.Spoke, manifests.FleetSpoke, manifests.BrokenSpoke, manifests.FleetWorkload)

	for _, tc := range []struct {
		name      string
		nodeClass string
		// fields of the MachineDeployment of the same name that must be named everywhere.
		fields []string
	}{
		{"a capacity that is no quantity", "broken-capacity", []string{capacityPrefix + "cpu]"}},
		{"negative capacity and sizes", "broken-sizes", []string{
			capacityPrefix + "memory]",
			"metadata.annotations[" + clusterv1.AutoscalerMinSizeAnnotation + "]",
			"metadata.annotations[" + clusterv1.AutoscalerMaxSizeAnnotation + "]",
		}},
		{"neither instance type nor capacity", "broken-silent", []string{capacityPrefix + "cpu]", capacityPrefix + "memory]"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, field := range tc.fields {
				poll(t, soon, conditionSays(tc.nodeClass, shimv1.ConditionNodeGroupsValid, field))
				poll(t, soon, eventSays("MachineDeployment", tc.nodeClass, field))
			}
			group := described(t, tc.nodeClass)
			for _, field := range tc.fields {
				require.True(t, slices.ContainsFunc(group.GetProblems(), func(p *agentv1alpha1.Problem) bool {
					return p.GetField() == field && p.GetMessage() != ""
				}), "%s: %v", field, group.GetProblems())
			}
			require.Equal(t, tc.nodeClass, group.GetInstanceType(), "the MachineDeployment's name stands in")
		})
	}

	t.Run("a selector that matches nothing", func(t *testing.T) {
		poll(t, soon, conditionSays("matches-nothing", shimv1.ConditionNodeGroupsFound, "spec.scalableResourceSelector"))
		poll(t, soon, conditionSays("matches-nothing", "Ready", shimv1.ConditionNodeGroupsFound))
		poll(t, soon, eventInSpokeSays("ClusterAPINodeClass", "matches-nothing", "spec.scalableResourceSelector"))
	})

	t.Run("pods of the others get their nodes", func(t *testing.T) {
		var class shimv1.ClusterAPINodeClass
		require.NoError(t, w.AwaitNodePool(within(t, soon), "default"))
		require.NoError(t, w.Spoke.Get(t.Context(), client.ObjectKey{Name: "default"}, &class))
		require.Zero(t, class.Status.Problems)
		goHome(t, "web")
		scale(t, "web", 1)
		await(t, soon, running(1))
	})
}

func TestBadCallsAreRefusedWithTheFieldNamed(t *testing.T) {
	shows(t, "bad calls are refused with the field named")
	leaveAsFound(t)
	state := w.Sandbox.State()
	admin := agentAs(t, state.Paths.AdminCertificate, state.Paths.AdminKey)
	shim := agentAs(t, state.Paths.ClientCertificate, state.Paths.ClientKey)
	reader := agentAs(t, state.Paths.ReaderCertificate, state.Paths.ReaderKey)
	valid := func() *agentv1alpha1.CreateClaimRequest {
		return &agentv1alpha1.CreateClaimRequest{
			Cluster: theCluster(), ClaimId: "e2e-bad-call", Holder: "karpenter", Candidates: []string{"fleet/nowhere"},
		}
	}
	elsewhere := &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: "nowhere"}

	for _, tc := range []struct {
		name   string
		change func(*agentv1alpha1.CreateClaimRequest)
		field  string
	}{
		{"no Cluster", func(r *agentv1alpha1.CreateClaimRequest) { r.Cluster = nil }, "cluster"},
		{"a Cluster without a name", func(r *agentv1alpha1.CreateClaimRequest) { r.Cluster.Name = "" }, "cluster.name"},
		{"a claim id with capitals", func(r *agentv1alpha1.CreateClaimRequest) { r.ClaimId = "Not-A-Label" }, "claim_id"},
		{"no holder", func(r *agentv1alpha1.CreateClaimRequest) { r.Holder = "" }, "holder"},
		{"no candidate", func(r *agentv1alpha1.CreateClaimRequest) { r.Candidates = nil }, "candidates"},
		{"a candidate that is no node group's id", func(r *agentv1alpha1.CreateClaimRequest) { r.Candidates = []string{"small"} }, "candidates[0]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			request := valid()
			tc.change(request)
			_, err := admin.Claims.CreateClaim(within(t, soon), request)
			require.True(t, agenterrors.IsInvalidArgument(err), "%v", err)
			fields := lo.Map(agenterrors.FieldViolations(err), func(v agenterrors.FieldViolation, _ int) string { return v.Field })
			require.Contains(t, fields, tc.field)
		})
	}
	t.Run("a Cluster that does not exist", func(t *testing.T) {
		request := valid()
		request.Cluster = elsewhere
		_, err := admin.Claims.CreateClaim(within(t, soon), request)
		require.Equal(t, codes.NotFound, status.Code(err), "%v", err)
		require.ErrorContains(t, err, "fleet/nowhere")
	})
	t.Run("a Cluster that is not the caller's, whether it exists or not", func(t *testing.T) {
		request := valid()
		request.Cluster = elsewhere
		_, err := shim.Claims.CreateClaim(within(t, soon), request)
		require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
	})
	t.Run("a writing call of who may only read", func(t *testing.T) {
		_, err := reader.Claims.CreateClaim(within(t, soon), valid())
		require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
	})
	t.Run("a holder that is not the caller's", func(t *testing.T) {
		request := valid()
		request.Holder = "cluster-autoscaler"
		_, err := shim.Claims.CreateClaim(within(t, soon), request)
		require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
		require.ErrorContains(t, err, "cluster-autoscaler")
	})
	t.Run("a node group that does not exist", func(t *testing.T) {
		_, err := shim.Claims.CreateClaim(within(t, soon), valid())
		require.Error(t, err)
		require.ErrorContains(t, err, "nowhere")
	})
}

func theCluster() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}
}

// conditionSays returns a condition for poll: a NodeClass's condition is False, and its message
// contains a text.
func conditionSays(nodeClass, kind, text string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var class shimv1.ClusterAPINodeClass
		if err := w.Spoke.Get(ctx, client.ObjectKey{Name: nodeClass}, &class); err != nil {
			return "", err
		}
		condition := class.StatusConditions().Get(kind)
		if condition == nil {
			return fmt.Sprintf("ClusterAPINodeClass %s to have the condition %s", nodeClass, kind), nil
		}
		if condition.IsFalse() && strings.Contains(condition.Message, text) {
			return "", nil
		}
		return fmt.Sprintf("the condition %s of ClusterAPINodeClass %s to be False and to name %s: it is %s, %q",
			kind, nodeClass, text, condition.Status, condition.Message), nil
	}
}

// eventSays and eventInSpokeSays return a condition for poll: an event about an object contains a
// text.
func eventSays(kind, name, text string) func(context.Context) (string, error) {
	return eventIn(w.Hub, kind, name, text)
}

func eventInSpokeSays(kind, name, text string) func(context.Context) (string, error) {
	return eventIn(w.Spoke, kind, name, text)
}

func eventIn(c client.Client, kind, name, text string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var events eventsv1.EventList
		if err := c.List(ctx, &events); err != nil {
			return "", err
		}
		for i := range events.Items {
			e := &events.Items[i]
			if strings.Contains(e.Note, text) && e.Regarding.Kind == kind && e.Regarding.Name == name {
				return "", nil
			}
		}
		return fmt.Sprintf("an event about %s %s that names %s", kind, name, text), nil
	}
}
