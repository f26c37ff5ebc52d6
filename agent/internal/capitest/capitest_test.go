package capitest_test

import (
	"context"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
)

const (
	patience = 30 * time.Second
	interval = 20 * time.Millisecond
)

var plane *capitest.ControlPlane

func TestMain(m *testing.M) { capitest.Main(m, &plane) }

type lister func(t require.TestingT) []clusterv1.Machine

// machinesIn lists the Machines of the namespace's MachineDeployment.
func machinesIn(namespace string) lister {
	return func(t require.TestingT) []clusterv1.Machine {
		machines := &clusterv1.MachineList{}
		require.NoError(t, plane.Client.List(context.Background(), machines, client.InNamespace(namespace),
			client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: "small"}))
		return machines.Items
	}
}

func setUp(t *testing.T, options capitest.Options, replicas int32) (*capitest.Model, *clusterv1.MachineDeployment, lister) {
	t.Helper()
	namespace := plane.Namespace(t)
	options.Namespaces = []string{namespace}
	model := capitest.RunForTest(t, plane, options)
	md := capitest.NewMachineDeployment(namespace, "small", "spoke", replicas)
	plane.Create(t, capitest.NewCluster(namespace, "spoke"), md)
	return model, md, machinesIn(namespace)
}

func joined(machines []clusterv1.Machine) int {
	return lo.CountBy(machines, func(machine clusterv1.Machine) bool { return machine.Status.NodeRef.IsDefined() })
}

func names(machines []clusterv1.Machine) []string {
	return lo.Map(machines, func(machine clusterv1.Machine, _ int) string { return machine.Name })
}

func scale(t require.TestingT, md *clusterv1.MachineDeployment, replicas int32) {
	require.NoError(t, plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md))
	before := md.DeepCopy()
	md.Spec.Replicas = new(replicas)
	require.NoError(t, plane.Client.Patch(context.Background(), md, client.MergeFrom(before)))
}

func TestReplicasBecomeMachinesWithNodes(t *testing.T) {
	_, md, machines := setUp(t, capitest.Options{}, 3)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, 3, joined(machines(c))) }, patience, interval)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.NoError(c, plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md))
		require.Equal(c, md.Generation, md.Status.ObservedGeneration)
		require.Equal(c, new(int32(3)), md.Status.AvailableReplicas)
	}, patience, interval)
}

func TestScaleDownTakesAnnotatedThenNodelessMachines(t *testing.T) {
	model, md, machines := setUp(t, capitest.Options{}, 2)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, 2, joined(machines(c))) }, patience, interval)
	old := machines(t)
	model.SetBehaviour(func(*clusterv1.Machine) capitest.Behaviour { return capitest.Behaviour{HoldProvision: true} })
	scale(t, md, 3)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Len(c, machines(c), 3) }, patience, interval)
	scale(t, md, 2)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.ElementsMatch(c, names(old), names(machines(c))) }, patience, interval)

	before := old[1].DeepCopy()
	old[1].Annotations = map[string]string{clusterv1.DeleteMachineAnnotation: ""}
	require.NoError(t, plane.Client.Patch(context.Background(), &old[1], client.MergeFrom(before)))
	scale(t, md, 1)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, []string{old[0].Name}, names(machines(c))) }, patience, interval)
}

func TestDeletingMachineHoldsItsReplicaUntilItIsGone(t *testing.T) {
	const finalizer = "example.com/hold"
	model, md, machines := setUp(t, capitest.Options{}, 2)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, 2, joined(machines(c))) }, patience, interval)
	survivor, victim := machines(t)[0], machines(t)[1]
	before := victim.DeepCopy()
	victim.Finalizers = append(victim.Finalizers, finalizer)
	require.NoError(t, plane.Client.Patch(context.Background(), &victim, client.MergeFrom(before)))

	model.SetBehaviour(func(*clusterv1.Machine) capitest.Behaviour { return capitest.Behaviour{HoldTerminate: true} })
	require.NoError(t, plane.Client.Delete(context.Background(), &victim))
	reason := func(t require.TestingT) string {
		require.NoError(t, plane.Client.Get(context.Background(), client.ObjectKeyFromObject(&victim), &victim))
		return ptr.Deref(capitest.Condition(&victim, clusterv1.MachineDeletingCondition), conditionNone).Reason
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.Equal(c, clusterv1.MachineDeletingWaitingForInfrastructureDeletionReason, reason(c))
	}, patience, interval)
	model.SetBehaviour(func(*clusterv1.Machine) capitest.Behaviour { return capitest.Behaviour{} })
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.Equal(c, clusterv1.MachineDeletingDeletionCompletedReason, reason(c))
	}, patience, interval)
	require.Equal(t, []string{finalizer}, victim.Finalizers)

	// The held Machine takes the decrement, so the other one stays.
	scale(t, md, 1)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		sets := &clusterv1.MachineSetList{}
		require.NoError(c, plane.Client.List(context.Background(), sets, client.InNamespace(md.Namespace)))
		require.Len(c, sets.Items, 1)
		require.Equal(c, new(int32(1)), sets.Items[0].Spec.Replicas)
		require.Equal(c, sets.Items[0].Generation, sets.Items[0].Status.ObservedGeneration)
	}, patience, interval)
	before = victim.DeepCopy()
	victim.Finalizers = nil
	require.NoError(t, plane.Client.Patch(context.Background(), &victim, client.MergeFrom(before)))
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, []string{survivor.Name}, names(machines(c))) }, patience, interval)
}

func TestUnheldDeletionIsReplaced(t *testing.T) {
	_, _, machines := setUp(t, capitest.Options{}, 1)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, 1, joined(machines(c))) }, patience, interval)
	first := machines(t)[0]
	require.NoError(t, plane.Client.Delete(context.Background(), &first))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		now := machines(c)
		require.Len(c, now, 1)
		require.NotEqual(c, first.Name, now[0].Name)
	}, patience, interval)
}

func TestPausedDeploymentDoesNotScaleAndSaysSo(t *testing.T) {
	_, md, machines := setUp(t, capitest.Options{}, 1)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, 1, joined(machines(c))) }, patience, interval)
	require.NoError(t, plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md))
	before := md.DeepCopy()
	capitest.Annotated(clusterv1.PausedAnnotation, "")(md)
	md.Spec.Replicas = ptr.To[int32](2)
	require.NoError(t, plane.Client.Patch(context.Background(), md, client.MergeFrom(before)))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.NoError(c, plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md))
		require.True(c, meta.IsStatusConditionTrue(md.Status.Conditions, clusterv1.PausedCondition))
	}, patience, interval)
	require.Len(t, machines(t), 1)
	before = md.DeepCopy()
	delete(md.Annotations, clusterv1.PausedAnnotation)
	require.NoError(t, plane.Client.Patch(context.Background(), md, client.MergeFrom(before)))
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Len(c, machines(c), 2) }, patience, interval)
}

func TestOnDeleteReplacesOnlyWhatIsDeleted(t *testing.T) {
	_, md, machines := setUp(t, capitest.Options{}, 2)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, 2, joined(machines(c))) }, patience, interval)
	old := machines(t)
	changeVersion(t, md)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		machine := machines(c)[0]
		condition := ptr.Deref(capitest.Condition(&machine, clusterv1.MachineUpToDateCondition), conditionNone)
		require.Equal(c, clusterv1.MachineNotUpToDateReason, condition.Reason)
	}, patience, interval)
	require.ElementsMatch(t, names(old), names(machines(t)))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.NoError(c, plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md))
		require.Equal(c, md.Generation, md.Status.ObservedGeneration)
	}, patience, interval, "the old MachineSet has been told not to create")
	require.NoError(t, plane.Client.Delete(context.Background(), &old[0]))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		now := machines(c)
		require.Equal(c, 2, joined(now))
		require.Contains(c, names(now), old[1].Name)
		require.NotContains(c, names(now), old[0].Name)
		require.Equal(c, 1, lo.CountBy(now, func(machine clusterv1.Machine) bool { return machine.Spec.Version == "v1.36.4" }))
	}, patience, interval)
}

func TestRollingUpdateReplacesEverything(t *testing.T) {
	namespace := plane.Namespace(t)
	capitest.RunForTest(t, plane, capitest.Options{Namespaces: []string{namespace}})
	md := capitest.NewMachineDeployment(namespace, "small", "spoke", 2, capitest.RollingUpdate)
	plane.Create(t, capitest.NewCluster(namespace, "spoke"), md)
	machines := machinesIn(namespace)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, 2, joined(machines(c))) }, patience, interval)
	changeVersion(t, md)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.Equal(c, []string{"v1.36.4", "v1.36.4"}, lo.Map(machines(c), func(machine clusterv1.Machine, _ int) string { return machine.Spec.Version }))
	}, patience, interval)
}

func TestInfrastructureFailureAndBlockedCreationAreShown(t *testing.T) {
	model, md, machines := setUp(t, capitest.Options{Behaviour: func(*clusterv1.Machine) capitest.Behaviour {
		return capitest.Behaviour{FailureReason: "OutOfStock", FailureMessage: "none left in zone-a"}
	}}, 1)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		all := machines(c)
		require.NotEmpty(c, all)
		condition := ptr.Deref(capitest.Condition(&all[0], clusterv1.MachineInfrastructureReadyCondition), conditionNone)
		require.Equal(c, "OutOfStock", condition.Reason)
	}, patience, interval)

	model.BlockCreation(types.NamespacedName{Namespace: md.Namespace, Name: md.Name}, "the control plane is being upgraded")
	scale(t, md, 2)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		sets := &clusterv1.MachineSetList{}
		require.NoError(c, plane.Client.List(context.Background(), sets, client.InNamespace(md.Namespace)))
		condition := meta.FindStatusCondition(sets.Items[0].Status.Conditions, clusterv1.MachineSetScalingUpCondition)
		require.NotNil(c, condition)
		require.Contains(c, condition.Message, "is blocked because:")
	}, patience, interval)
	require.Len(t, machines(t), 1)
	model.BlockCreation(types.NamespacedName{Namespace: md.Namespace, Name: md.Name}, "")
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Len(c, machines(c), 2) }, patience, interval)
}

func TestPreTerminateHookHoldsTheInstance(t *testing.T) {
	const hook = clusterv1.PreTerminateDeleteHookAnnotationPrefix + "/test"
	model, _, machines := setUp(t, capitest.Options{}, 1)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, 1, joined(machines(c))) }, patience, interval)
	victim := machines(t)[0]
	model.SetBehaviour(func(*clusterv1.Machine) capitest.Behaviour { return capitest.Behaviour{Drain: time.Hour} })
	require.NoError(t, plane.Client.Delete(context.Background(), &victim))
	reason := func(t require.TestingT) string {
		require.NoError(t, plane.Client.Get(context.Background(), client.ObjectKeyFromObject(&victim), &victim))
		return ptr.Deref(capitest.Condition(&victim, clusterv1.MachineDeletingCondition), conditionNone).Reason
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, clusterv1.MachineDeletingDrainingNodeReason, reason(c)) }, patience, interval)
	before := victim.DeepCopy()
	victim.Annotations = map[string]string{hook: "", clusterv1.ExcludeNodeDrainingAnnotation: ""}
	require.NoError(t, plane.Client.Patch(context.Background(), &victim, client.MergeFrom(before)))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.Equal(c, clusterv1.MachineDeletingWaitingForPreTerminateHookReason, reason(c))
	}, patience, interval)
	before = victim.DeepCopy()
	delete(victim.Annotations, hook)
	require.NoError(t, plane.Client.Patch(context.Background(), &victim, client.MergeFrom(before)))
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.NotContains(c, names(machines(c)), victim.Name) }, patience, interval)
}

func changeVersion(t require.TestingT, md *clusterv1.MachineDeployment) {
	require.NoError(t, plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md))
	before := md.DeepCopy()
	md.Spec.Template.Spec.Version = "v1.36.4"
	require.NoError(t, plane.Client.Patch(context.Background(), md, client.MergeFrom(before)))
}

var conditionNone metav1.Condition
