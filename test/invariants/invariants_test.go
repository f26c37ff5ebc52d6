package invariants_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

var cluster = types.NamespacedName{Namespace: "fleet", Name: "spoke"}

const (
	claimID     = "0b7c1a34-6d0c-4f5e-8a8e-000000000001"
	idOfClaimed = "sim://spoke/claimed"
)

// fixture is a node group at rest with two machines: the user's own and a claimed one.
type fixture struct {
	group            *clusterv1.MachineDeployment
	own, claimed     *clusterv1.Machine
	claim            *agentv1.MachineClaim
	nodeClaim        *karpenterv1.NodeClaim
	ownNode, newNode *corev1.Node
	// further objects of the hub and of the spoke.
	hub, spoke []client.Object
}

func atRest() *fixture {
	nodeClaim := &karpenterv1.NodeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "default-x", UID: claimID},
		Status:     karpenterv1.NodeClaimStatus{ProviderID: idOfClaimed, NodeName: "claimed"},
	}
	nodeClaim.StatusConditions().SetTrue(karpenterv1.ConditionTypeLaunched)
	nodeClaim.StatusConditions().SetTrue(karpenterv1.ConditionTypeRegistered)
	return &fixture{
		group: &clusterv1.MachineDeployment{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: cluster.Namespace, Name: "small",
				Labels: map[string]string{agentv1.MemberLabel: ""},
				Annotations: map[string]string{
					agentv1.LedgerAnnotation:              `{"v":1,"seq":7,"floor":1,"lastReplicas":2,"spare":0}`,
					clusterv1.AutoscalerMaxSizeAnnotation: "3",
				},
			},
			Spec: clusterv1.MachineDeploymentSpec{ClusterName: cluster.Name, Replicas: ptr.To[int32](2)},
		},
		own:     machine("own", ""),
		claimed: machine("claimed", claimID),
		claim: &agentv1.MachineClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: cluster.Namespace, Name: agentv1.ObjectName(cluster.Name, claimID)},
			Spec: agentv1.MachineClaimSpec{
				ClusterName: cluster.Name, ClaimID: claimID, Holder: invariants.Holder, NodeGroup: "small", DisplayName: "default-x",
			},
			Status: agentv1.MachineClaimStatus{
				Phase: agentv1.PhaseBound, Machine: &agentv1.MachineReference{Name: "claimed", UID: "uid-claimed"},
			},
		},
		nodeClaim: nodeClaim,
		ownNode:   node("own"),
		newNode:   node("claimed"),
	}
}

func machine(name, claimID string) *clusterv1.Machine {
	m := &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: cluster.Namespace, Name: name, UID: types.UID("uid-" + name),
			Labels:     map[string]string{clusterv1.MachineDeploymentNameLabel: "small"},
			Finalizers: []string{clusterv1.MachineFinalizer},
		},
		Spec:   clusterv1.MachineSpec{ClusterName: cluster.Name, ProviderID: "sim://spoke/" + name},
		Status: clusterv1.MachineStatus{NodeRef: clusterv1.MachineNodeReference{Name: name}},
	}
	if claimID != "" {
		m.Labels[agentv1.ClaimLabel] = claimID
	}
	return m
}

func node(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{ProviderID: "sim://spoke/" + name}}
}

func (s *fixture) clients() (hub, spoke client.WithWatch) {
	present := func(objects ...client.Object) []client.Object {
		return lo.Filter(objects, func(o client.Object, _ int) bool { return !isNil(o) })
	}
	scheme := testenv.Scheme()
	hub = fake.NewClientBuilder().WithScheme(scheme).
		WithObjects(present(append(s.hub, s.group, s.own, s.claimed, s.claim)...)...).Build()
	spoke = fake.NewClientBuilder().WithScheme(scheme).
		WithObjects(present(append(s.spoke, s.nodeClaim, s.ownNode, s.newNode)...)...).Build()
	return hub, spoke
}

// isNil reports whether the object is nil: a nil pointer in an interface is not a nil interface.
func isNil(o client.Object) bool {
	switch o := o.(type) {
	case *clusterv1.Machine:
		return o == nil
	case *agentv1.MachineClaim:
		return o == nil
	case *karpenterv1.NodeClaim:
		return o == nil
	case *corev1.Node:
		return o == nil
	}
	return false
}

func (s *fixture) read(t *testing.T) invariants.State {
	t.Helper()
	hub, spoke := s.clients()
	state, err := invariants.Read(t.Context(), hub, spoke, cluster)
	if err != nil {
		t.Fatal(err)
	}
	return state
}

func (s *fixture) ledger(text string) { s.group.Annotations[agentv1.LedgerAnnotation] = text }

func TestNothingIsWrongAtRest(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*fixture)
	}{
		{"one machine is the user's, one is claimed", func(*fixture) {}},
		{"a person has raised the floor and the agent has not written since", func(s *fixture) {
			s.group.Spec.Replicas = ptr.To[int32](3)
			s.hub = append(s.hub, machine("another", ""))
			s.spoke = append(s.spoke, node("another"))
		}},
		{"the min size is above the floor that was noted", func(s *fixture) {
			s.group.Annotations[clusterv1.AutoscalerMinSizeAnnotation] = "1"
			s.ledger(`{"v":1,"seq":7,"floor":0,"lastReplicas":2}`)
		}},
		{"the user's machines alone are above the max size", func(s *fixture) {
			s.group.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = "1"
			s.ledger(`{"v":1,"seq":7,"floor":2,"lastReplicas":2}`)
			delete(s.claimed.Labels, agentv1.ClaimLabel)
			s.claim, s.nodeClaim = nil, nil
		}},
		{"a claim has ended and is remembered", func(s *fixture) {
			ended := s.claim.DeepCopy()
			ended.Name, ended.Spec.ClaimID, ended.Status.Phase = "spoke.ended", "ended", agentv1.PhaseEnded
			s.hub = append(s.hub, ended)
		}},
		{"another holder than Karpenter has the claim", func(s *fixture) {
			s.claim.Spec.Holder = "a-person"
			s.nodeClaim = nil
		}},
		{"another Cluster of the namespace is in turmoil", func(s *fixture) {
			other := machine("other", "nobodys")
			other.Spec.ClusterName = "other"
			s.hub = append(s.hub, other)
		}},
		{"a group was never claimed from", func(s *fixture) {
			s.hub = append(s.hub, &clusterv1.MachineDeployment{
				ObjectMeta: metav1.ObjectMeta{Namespace: cluster.Namespace, Name: "idle"},
				Spec:       clusterv1.MachineDeploymentSpec{ClusterName: cluster.Name, Replicas: ptr.To[int32](0)},
			})
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := atRest()
			tc.change(s)
			require.Empty(t, s.read(t).AtRest())
		})
	}
}

func TestEachViolationIsCaught(t *testing.T) {
	now := metav1.Now()
	for _, tc := range []struct {
		name   string
		change func(*fixture)
		rule   invariants.Rule
		object string
		// always means that it must never be violated, not even briefly.
		always bool
	}{
		{"two live claims have one Machine", func(s *fixture) {
			second := s.claim.DeepCopy()
			second.Name, second.Spec.ClaimID = "spoke.second", "second"
			s.hub = append(s.hub, second)
		}, invariants.OneClaimOneMachine, "MachineClaim spoke.second", true},
		{"two Machines carry one claim's label", func(s *fixture) {
			s.own.Labels[agentv1.ClaimLabel] = claimID
		}, invariants.OneClaimOneMachine, "Machine own", false},
		{"a Machine carries the label of a claim that ended", func(s *fixture) {
			s.claim.Status.Phase = agentv1.PhaseEnded
		}, invariants.OneClaimOneMachine, "Machine claimed", false},
		{"a Bound claim's Machine lacks the label", func(s *fixture) {
			delete(s.claimed.Labels, agentv1.ClaimLabel)
		}, invariants.OneClaimOneMachine, "MachineClaim spoke." + claimID, false},
		{"a claim's Machine is of another group", func(s *fixture) {
			s.claim.Spec.NodeGroup = "large"
		}, invariants.OneClaimOneMachine, "Machine claimed", false},
		{"two Machines have one provider ID", func(s *fixture) {
			s.own.Spec.ProviderID = idOfClaimed
		}, invariants.OneClaimOneMachine, "Machine own", false},
		{"two NodeClaims have one provider ID", func(s *fixture) {
			second := s.nodeClaim.DeepCopy()
			second.Name, second.UID = "default-y", "second"
			s.spoke = append(s.spoke, second)
		}, invariants.OneProviderID, "NodeClaim default-y", true},
		{"a NodeClaim has another's placeholder", func(s *fixture) {
			s.nodeClaim.Status.ProviderID = "capi-claim://fleet/spoke/another"
		}, invariants.OneProviderID, "NodeClaim default-x", true},
		{"replicas exceed the floor and the claims", func(s *fixture) {
			s.group.Spec.Replicas = ptr.To[int32](3)
			s.ledger(`{"v":1,"seq":7,"floor":1,"lastReplicas":3,"spare":1}`)
			s.hub = append(s.hub, machine("spare", ""))
			s.spoke = append(s.spoke, node("spare"))
		}, invariants.Accounting, "MachineDeployment small", false},
		{"a Machine is missing", func(s *fixture) {
			s.own, s.ownNode = nil, nil
		}, invariants.Accounting, "MachineDeployment small", false},
		{"the floor was taken", func(s *fixture) {
			s.group.Spec.Replicas = ptr.To[int32](1)
			s.ledger(`{"v":1,"seq":7,"floor":1,"lastReplicas":1}`)
			s.own, s.ownNode = nil, nil
		}, invariants.Accounting, "MachineDeployment small", false},
		{"claims live and there is no ledger", func(s *fixture) {
			delete(s.group.Annotations, agentv1.LedgerAnnotation)
		}, invariants.Accounting, "MachineDeployment small", false},
		{"the ledger is not readable", func(s *fixture) {
			s.ledger("{")
		}, invariants.Accounting, "MachineDeployment small", false},
		{"the group is above its max size", func(s *fixture) {
			s.group.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = "1"
		}, invariants.MaxSize, "MachineDeployment small", false},
		{"the agent's finalizer is on a Machine that is not being released", func(s *fixture) {
			s.own.Finalizers = append(s.own.Finalizers, agentv1.ReleaseFinalizer)
		}, invariants.FinalizerOnLive, "Machine own", true},
		{"a Machine was marked for release and never deleted", func(s *fixture) {
			s.own.Finalizers = append(s.own.Finalizers, agentv1.ReleaseFinalizer)
			s.own.Annotations = map[string]string{clusterv1.DeleteMachineAnnotation: agentv1.Group}
		}, invariants.FinalizerOnLive, "Machine own", false},
		{"a Machine is being deleted for ever", func(s *fixture) {
			s.own.DeletionTimestamp = &now
		}, invariants.NothingInFlight, "Machine own", false},
		{"a claim is being released for ever", func(s *fixture) {
			s.claim.Status.Phase = agentv1.PhaseReleasing
		}, invariants.NothingInFlight, "MachineClaim spoke." + claimID, false},
		{"a claim never gets a Machine", func(s *fixture) {
			s.claim.Status.Phase, s.claim.Status.Machine = agentv1.PhasePending, nil
		}, invariants.NothingInFlight, "MachineClaim spoke." + claimID, false},
		{"the ledger holds a pending claim", func(s *fixture) {
			s.ledger(`{"v":1,"seq":7,"floor":1,"lastReplicas":2,"pending":{"` + claimID + `":{}}}`)
		}, invariants.NothingInFlight, "MachineDeployment small", false},
		{"the ledger holds a release", func(s *fixture) {
			s.ledger(`{"v":1,"seq":7,"floor":1,"lastReplicas":2,"releasing":{"uid-gone":{"m":"gone"}}}`)
		}, invariants.NothingInFlight, "MachineDeployment small", false},
		{"the agent's pause was left behind", func(s *fixture) {
			s.group.Annotations[clusterv1.PausedAnnotation] = agentv1.PausedByAgent
		}, invariants.NothingInFlight, "MachineDeployment small", false},
		{"a claim outlives its NodeClaim", func(s *fixture) {
			s.nodeClaim = nil
		}, invariants.ClaimHasNodeClaim, "MachineClaim spoke." + claimID, false},
		{"a NodeClaim has no claim", func(s *fixture) {
			s.claim.Spec.ClaimID = "another"
		}, invariants.NodeClaimHasClaim, "NodeClaim default-x", false},
		{"a NodeClaim keeps its placeholder", func(s *fixture) {
			s.nodeClaim.Status.ProviderID = "capi-claim://fleet/spoke/" + claimID
		}, invariants.SameProviderID, "NodeClaim default-x", false},
		{"a NodeClaim is being deleted for ever", func(s *fixture) {
			s.nodeClaim.DeletionTimestamp, s.nodeClaim.Finalizers = &now, []string{karpenterv1.TerminationFinalizer}
		}, invariants.NothingInFlight, "NodeClaim default-x", false},
		{"a registered NodeClaim's Node is gone", func(s *fixture) {
			s.newNode = nil
		}, invariants.RegisteredHasOneNode, "NodeClaim default-x", false},
		{"a Node outlives its Machine", func(s *fixture) {
			s.spoke = append(s.spoke, node("left-behind"))
		}, invariants.NodeHasMachine, "Node left-behind", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := atRest()
			tc.change(s)
			state := s.read(t)
			caught := func(v invariants.Violation) bool {
				return v.Rule == tc.rule && v.Object == tc.object && v.Message != ""
			}
			require.True(t, slices.ContainsFunc(state.AtRest(), caught), "%v", state.AtRest())
			if tc.always {
				require.True(t, slices.ContainsFunc(state.Always(), caught), "%v", state.Always())
			} else {
				require.Empty(t, state.Always())
			}
		})
	}
}

func TestSettle(t *testing.T) {
	check := func(t *testing.T, hub, spoke client.Reader) ([]invariants.Violation, error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		return invariants.Checker{Hub: hub, Spoke: spoke, Cluster: cluster}.Settle(ctx)
	}

	t.Run("waits until everything holds", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := atRest()
			s.spoke = append(s.spoke, node("going"))
			hub, spoke := s.clients()
			began := time.Now()
			time.AfterFunc(20*time.Second, func() { _ = spoke.Delete(t.Context(), node("going")) })
			violations, err := check(t, hub, spoke)
			require.NoError(t, err)
			require.Empty(t, violations)
			require.GreaterOrEqual(t, time.Since(began), 20*time.Second)
		})
	})
	t.Run("returns what is still wrong at the end", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := atRest()
			s.spoke = append(s.spoke, node("left-behind"))
			hub, spoke := s.clients()
			violations, err := check(t, hub, spoke)
			require.NoError(t, err)
			require.Len(t, violations, 1)
			require.Equal(t, invariants.NodeHasMachine, violations[0].Rule)
		})
	})
	t.Run("does not wait for what must hold always", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := atRest()
			s.own.Finalizers = append(s.own.Finalizers, agentv1.ReleaseFinalizer)
			hub, spoke := s.clients()
			began := time.Now()
			violations, err := check(t, hub, spoke)
			require.NoError(t, err)
			require.Len(t, violations, 1)
			require.Equal(t, invariants.FinalizerOnLive, violations[0].Rule)
			require.Zero(t, time.Since(began))
		})
	})
	t.Run("bears with an API server that is away for a while", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			hub, spoke := atRest().clients()
			back := time.Now().Add(10 * time.Second)
			away := interceptor.NewClient(hub, interceptor.Funcs{
				List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
					if time.Now().Before(back) {
						return errors.New("connection refused")
					}
					return c.List(ctx, list, opts...)
				},
			})
			violations, err := check(t, away, spoke)
			require.NoError(t, err)
			require.Empty(t, violations)
		})
	})
	t.Run("fails when nothing can be read", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			hub, spoke := atRest().clients()
			away := interceptor.NewClient(hub, interceptor.Funcs{
				List: func(context.Context, client.WithWatch, client.ObjectList, ...client.ListOption) error {
					return errors.New("connection refused")
				},
			})
			_, err := check(t, away, spoke)
			require.ErrorContains(t, err, "connection refused")
		})
	})
}

// Another NodePool, with a node group of its own, is busy.
func TestAPartIsAtRestByItself(t *testing.T) {
	part := invariants.Part{NodeGroup: "small", NodePool: "default", InstanceType: "small"}
	busy := func() *fixture {
		s := atRest()
		s.nodeClaim.Labels = map[string]string{karpenterv1.NodePoolLabelKey: part.NodePool}
		for _, n := range []*corev1.Node{s.ownNode, s.newNode} {
			n.Labels = map[string]string{corev1.LabelInstanceTypeStable: part.InstanceType}
		}
		group := s.group.DeepCopy()
		group.Name, group.Spec.Replicas = "other", ptr.To[int32](9)
		going := machine("going", "")
		going.Labels[clusterv1.MachineDeploymentNameLabel], going.DeletionTimestamp = "other", new(metav1.Now())
		claim := s.claim.DeepCopy()
		claim.Name, claim.Spec.ClaimID, claim.Spec.NodeGroup = "spoke.other", "other", "other"
		claim.Status = agentv1.MachineClaimStatus{Phase: agentv1.PhasePending}
		nodeClaim := s.nodeClaim.DeepCopy()
		nodeClaim.Name, nodeClaim.UID, nodeClaim.Status.ProviderID = "other-x", "unclaimed", ""
		nodeClaim.Labels = map[string]string{karpenterv1.NodePoolLabelKey: "other"}
		left := node("left-behind")
		left.Labels = map[string]string{corev1.LabelInstanceTypeStable: "other"}
		s.hub, s.spoke = append(s.hub, group, going, claim), append(s.spoke, nodeClaim, left)
		return s
	}
	settle := func(t *testing.T, s *fixture) []invariants.Violation {
		t.Helper()
		hub, spoke := s.clients()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		violations, err := invariants.Checker{Hub: hub, Spoke: spoke, Cluster: cluster, Part: &part}.Settle(ctx)
		require.NoError(t, err)
		return violations
	}
	t.Run("the others are not waited for", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			require.NotEmpty(t, busy().read(t).AtRest())
			require.Empty(t, settle(t, busy()))
		})
	})
	for name, violate := range map[string]func(*fixture){
		"its claim is not":        func(s *fixture) { s.claim.Status.Phase = agentv1.PhaseReleasing },
		"its Machine is not":      func(s *fixture) { s.own.DeletionTimestamp = new(metav1.Now()) },
		"its replicas are not":    func(s *fixture) { s.group.Spec.Replicas = ptr.To[int32](3) },
		"its NodeClaim is not":    func(s *fixture) { s.nodeClaim.UID = "another" },
		"one of its Nodes is not": func(s *fixture) { s.ownNode.Spec.ProviderID = "sim://spoke/another" },
		"anything is always wrong": func(s *fixture) { // two claims of different groups have one Machine
			second := s.claim.DeepCopy()
			second.Name, second.Spec.ClaimID, second.Spec.NodeGroup = "spoke.second", "second", "other"
			s.hub = append(s.hub, second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := busy()
				violate(s)
				require.NotEmpty(t, settle(t, s))
			})
		})
	}
}

func TestViolationsAreReadable(t *testing.T) {
	require.Equal(t, "  Node a: belongs to no Machine (every Node is a Machine's)", invariants.Describe([]invariants.Violation{
		{Rule: invariants.NodeHasMachine, Object: "Node a", Message: "belongs to no Machine"},
	}))
}
