package capitest_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
)

var plane *capitest.ControlPlane

func TestMain(m *testing.M) {
	// Flags are parsed before anything is started, because an unknown flag ends the process.
	flag.Parse()
	log.SetLogger(logr.Discard())
	// The timeout is set before the first test, because each test takes over the defaults when it
	// begins.
	SetDefaultEventuallyTimeout(30 * time.Second)
	SetDefaultEventuallyPollingInterval(20 * time.Millisecond)
	var err error
	if plane, err = capitest.StartControlPlane(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if err := plane.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func setUp(t *testing.T, options capitest.Options, replicas int32) (*capitest.Model, *clusterv1.MachineDeployment, func() []clusterv1.Machine) {
	t.Helper()
	namespace := plane.Namespace(t)
	options.Namespaces = []string{namespace}
	model := capitest.RunForTest(t, plane, options)
	md := capitest.NewMachineDeployment(namespace, "small", "spoke", replicas)
	plane.Create(t, capitest.NewCluster(namespace, "spoke"), md)
	return model, md, func() []clusterv1.Machine { return plane.Machines(t, namespace, "small") }
}

func joined(machines []clusterv1.Machine) int {
	return lo.CountBy(machines, func(machine clusterv1.Machine) bool { return machine.Status.NodeRef.IsDefined() })
}

func names(machines []clusterv1.Machine) []string {
	return lo.Map(machines, func(machine clusterv1.Machine, _ int) string { return machine.Name })
}

func scale(g Gomega, md *clusterv1.MachineDeployment, replicas int32) {
	g.Expect(plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md)).To(Succeed())
	before := md.DeepCopy()
	md.Spec.Replicas = new(replicas)
	g.Expect(plane.Client.Patch(context.Background(), md, client.MergeFrom(before))).To(Succeed())
}

func TestReplicasBecomeMachinesWithNodes(t *testing.T) {
	g := NewWithT(t)
	_, md, machines := setUp(t, capitest.Options{}, 3)
	g.Eventually(func() int { return joined(machines()) }).Should(Equal(3))
	g.Eventually(func(g Gomega) {
		g.Expect(plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md)).To(Succeed())
		g.Expect(md.Status.ObservedGeneration).To(Equal(md.Generation))
		g.Expect(md.Status.AvailableReplicas).To(HaveValue(BeEquivalentTo(3)))
	}).Should(Succeed())
}

func TestScaleDownTakesAnnotatedThenNodelessMachines(t *testing.T) {
	g := NewWithT(t)
	model, md, machines := setUp(t, capitest.Options{}, 2)
	g.Eventually(func() int { return joined(machines()) }).Should(Equal(2))
	old := machines()
	model.SetBehaviour(func(*clusterv1.Machine) capitest.Behaviour { return capitest.Behaviour{HoldProvision: true} })
	scale(g, md, 3)
	g.Eventually(machines).Should(HaveLen(3))
	scale(g, md, 2)
	g.Eventually(func() []string { return names(machines()) }).Should(ConsistOf(names(old)))

	before := old[1].DeepCopy()
	old[1].Annotations = map[string]string{clusterv1.DeleteMachineAnnotation: ""}
	g.Expect(plane.Client.Patch(context.Background(), &old[1], client.MergeFrom(before))).To(Succeed())
	scale(g, md, 1)
	g.Eventually(func() []string { return names(machines()) }).Should(ConsistOf(old[0].Name))
}

func TestDeletingMachineHoldsItsReplicaUntilItIsGone(t *testing.T) {
	g := NewWithT(t)
	const finalizer = "example.com/hold"
	model, md, machines := setUp(t, capitest.Options{}, 2)
	g.Eventually(func() int { return joined(machines()) }).Should(Equal(2))
	survivor, victim := machines()[0], machines()[1]
	before := victim.DeepCopy()
	victim.Finalizers = append(victim.Finalizers, finalizer)
	g.Expect(plane.Client.Patch(context.Background(), &victim, client.MergeFrom(before))).To(Succeed())

	model.SetBehaviour(func(*clusterv1.Machine) capitest.Behaviour { return capitest.Behaviour{HoldTerminate: true} })
	g.Expect(plane.Client.Delete(context.Background(), &victim)).To(Succeed())
	reason := func() string {
		g.Expect(plane.Client.Get(context.Background(), client.ObjectKeyFromObject(&victim), &victim)).To(Succeed())
		return ptr.Deref(capitest.Condition(&victim, clusterv1.MachineDeletingCondition), conditionNone).Reason
	}
	g.Eventually(reason).Should(Equal(clusterv1.MachineDeletingWaitingForInfrastructureDeletionReason))
	model.SetBehaviour(func(*clusterv1.Machine) capitest.Behaviour { return capitest.Behaviour{} })
	g.Eventually(reason).Should(Equal(clusterv1.MachineDeletingDeletionCompletedReason))
	g.Expect(victim.Finalizers).To(ConsistOf(finalizer))

	// The held Machine takes the decrement, so the other one stays.
	scale(g, md, 1)
	g.Eventually(func(g Gomega) {
		sets := &clusterv1.MachineSetList{}
		g.Expect(plane.Client.List(context.Background(), sets, client.InNamespace(md.Namespace))).To(Succeed())
		g.Expect(sets.Items).To(HaveLen(1))
		g.Expect(sets.Items[0].Spec.Replicas).To(HaveValue(BeEquivalentTo(1)))
		g.Expect(sets.Items[0].Status.ObservedGeneration).To(Equal(sets.Items[0].Generation))
	}).Should(Succeed())
	before = victim.DeepCopy()
	victim.Finalizers = nil
	g.Expect(plane.Client.Patch(context.Background(), &victim, client.MergeFrom(before))).To(Succeed())
	g.Eventually(func() []string { return names(machines()) }).Should(ConsistOf(survivor.Name))
}

func TestUnheldDeletionIsReplaced(t *testing.T) {
	g := NewWithT(t)
	_, _, machines := setUp(t, capitest.Options{}, 1)
	g.Eventually(func() int { return joined(machines()) }).Should(Equal(1))
	first := machines()[0]
	g.Expect(plane.Client.Delete(context.Background(), &first)).To(Succeed())
	g.Eventually(func(g Gomega) {
		now := machines()
		g.Expect(now).To(HaveLen(1))
		g.Expect(now[0].Name).NotTo(Equal(first.Name))
	}).Should(Succeed())
}

func TestPausedDeploymentDoesNotScaleAndSaysSo(t *testing.T) {
	g := NewWithT(t)
	_, md, machines := setUp(t, capitest.Options{}, 1)
	g.Eventually(func() int { return joined(machines()) }).Should(Equal(1))
	g.Expect(plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md)).To(Succeed())
	before := md.DeepCopy()
	capitest.Annotated(clusterv1.PausedAnnotation, "")(md)
	md.Spec.Replicas = ptr.To[int32](2)
	g.Expect(plane.Client.Patch(context.Background(), md, client.MergeFrom(before))).To(Succeed())
	g.Eventually(func() bool {
		g.Expect(plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md)).To(Succeed())
		return meta.IsStatusConditionTrue(md.Status.Conditions, clusterv1.PausedCondition)
	}).Should(BeTrue())
	g.Expect(machines()).To(HaveLen(1))
	before = md.DeepCopy()
	delete(md.Annotations, clusterv1.PausedAnnotation)
	g.Expect(plane.Client.Patch(context.Background(), md, client.MergeFrom(before))).To(Succeed())
	g.Eventually(machines).Should(HaveLen(2))
}

func TestOnDeleteReplacesOnlyWhatIsDeleted(t *testing.T) {
	g := NewWithT(t)
	_, md, machines := setUp(t, capitest.Options{}, 2)
	g.Eventually(func() int { return joined(machines()) }).Should(Equal(2))
	old := machines()
	changeVersion(g, md)
	g.Eventually(func() bool {
		machine := machines()[0]
		condition := capitest.Condition(&machine, clusterv1.MachineUpToDateCondition)
		return condition != nil && condition.Reason == clusterv1.MachineNotUpToDateReason
	}).Should(BeTrue())
	g.Expect(names(machines())).To(ConsistOf(names(old)))
	g.Eventually(func(g Gomega) {
		g.Expect(plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md)).To(Succeed())
		g.Expect(md.Status.ObservedGeneration).To(Equal(md.Generation))
	}).Should(Succeed(), "the old MachineSet has been told not to create")
	g.Expect(plane.Client.Delete(context.Background(), &old[0])).To(Succeed())
	g.Eventually(func(g Gomega) {
		now := machines()
		g.Expect(joined(now)).To(Equal(2))
		g.Expect(names(now)).To(ContainElement(old[1].Name))
		g.Expect(names(now)).NotTo(ContainElement(old[0].Name))
		g.Expect(lo.CountBy(now, func(machine clusterv1.Machine) bool { return machine.Spec.Version == "v1.36.4" })).To(Equal(1))
	}).Should(Succeed())
}

func TestRollingUpdateReplacesEverything(t *testing.T) {
	g := NewWithT(t)
	namespace := plane.Namespace(t)
	capitest.RunForTest(t, plane, capitest.Options{Namespaces: []string{namespace}})
	md := capitest.NewMachineDeployment(namespace, "small", "spoke", 2, capitest.RollingUpdate)
	plane.Create(t, capitest.NewCluster(namespace, "spoke"), md)
	machines := func() []clusterv1.Machine { return plane.Machines(t, namespace, "small") }
	g.Eventually(func() int { return joined(machines()) }).Should(Equal(2))
	changeVersion(g, md)
	g.Eventually(func() []string {
		return lo.Map(machines(), func(machine clusterv1.Machine, _ int) string { return machine.Spec.Version })
	}).Should(Equal([]string{"v1.36.4", "v1.36.4"}))
}

func TestInfrastructureFailureAndBlockedCreationAreShown(t *testing.T) {
	g := NewWithT(t)
	model, md, machines := setUp(t, capitest.Options{Behaviour: func(*clusterv1.Machine) capitest.Behaviour {
		return capitest.Behaviour{FailureReason: "OutOfStock", FailureMessage: "none left in zone-a"}
	}}, 1)
	g.Eventually(func() string {
		all := machines()
		if len(all) == 0 {
			return ""
		}
		return ptr.Deref(capitest.Condition(&all[0], clusterv1.MachineInfrastructureReadyCondition), conditionNone).Reason
	}).Should(Equal("OutOfStock"))

	model.BlockCreation(types.NamespacedName{Namespace: md.Namespace, Name: md.Name}, "the control plane is being upgraded")
	scale(g, md, 2)
	g.Eventually(func(g Gomega) {
		sets := &clusterv1.MachineSetList{}
		g.Expect(plane.Client.List(context.Background(), sets, client.InNamespace(md.Namespace))).To(Succeed())
		condition := meta.FindStatusCondition(sets.Items[0].Status.Conditions, clusterv1.MachineSetScalingUpCondition)
		g.Expect(condition).NotTo(BeNil())
		g.Expect(condition.Message).To(ContainSubstring("is blocked because:"))
	}).Should(Succeed())
	g.Expect(machines()).To(HaveLen(1))
	model.BlockCreation(types.NamespacedName{Namespace: md.Namespace, Name: md.Name}, "")
	g.Eventually(machines).Should(HaveLen(2))
}

func TestPreTerminateHookHoldsTheInstance(t *testing.T) {
	g := NewWithT(t)
	const hook = clusterv1.PreTerminateDeleteHookAnnotationPrefix + "/test"
	model, _, machines := setUp(t, capitest.Options{}, 1)
	g.Eventually(func() int { return joined(machines()) }).Should(Equal(1))
	victim := machines()[0]
	model.SetBehaviour(func(*clusterv1.Machine) capitest.Behaviour { return capitest.Behaviour{Drain: time.Hour} })
	g.Expect(plane.Client.Delete(context.Background(), &victim)).To(Succeed())
	reason := func() string {
		g.Expect(plane.Client.Get(context.Background(), client.ObjectKeyFromObject(&victim), &victim)).To(Succeed())
		return ptr.Deref(capitest.Condition(&victim, clusterv1.MachineDeletingCondition), conditionNone).Reason
	}
	g.Eventually(reason).Should(Equal(clusterv1.MachineDeletingDrainingNodeReason))
	before := victim.DeepCopy()
	victim.Annotations = map[string]string{hook: "", clusterv1.ExcludeNodeDrainingAnnotation: ""}
	g.Expect(plane.Client.Patch(context.Background(), &victim, client.MergeFrom(before))).To(Succeed())
	g.Eventually(reason).Should(Equal(clusterv1.MachineDeletingWaitingForPreTerminateHookReason))
	before = victim.DeepCopy()
	delete(victim.Annotations, hook)
	g.Expect(plane.Client.Patch(context.Background(), &victim, client.MergeFrom(before))).To(Succeed())
	g.Eventually(func() []string { return names(machines()) }).ShouldNot(ContainElement(victim.Name))
}

func changeVersion(g Gomega, md *clusterv1.MachineDeployment) {
	g.Expect(plane.Client.Get(context.Background(), client.ObjectKeyFromObject(md), md)).To(Succeed())
	before := md.DeepCopy()
	md.Spec.Template.Spec.Version = "v1.36.4"
	g.Expect(plane.Client.Patch(context.Background(), md, client.MergeFrom(before))).To(Succeed())
}

var conditionNone metav1.Condition
