package protocol

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

const (
	namespace   = "default"
	clusterName = "workload"
)

// inspect makes Cluster API state that it looked for the Machine's Node, as it does while there is
// none.
func inspect(m *clusterv1.Machine) {
	meta.SetStatusCondition(&m.Status.Conditions, metav1.Condition{
		Type: clusterv1.MachineNodeReadyCondition, Status: metav1.ConditionUnknown, Reason: clusterv1.MachineNodeInspectionFailedReason,
		Message: "Waiting for a Node with spec.providerID " + m.Spec.ProviderID + " to exist",
	})
}

func newTestTime() time.Time { return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) }

// atRest is a snapshot of a node group at rest: everything observed, one MachineSet.
func atRest(replicas int32, ledger *Ledger) *Snapshot {
	now := newTestTime()
	return &Snapshot{
		Deployment: &clusterv1.MachineDeployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "small", Generation: 3},
			Spec:       clusterv1.MachineDeploymentSpec{ClusterName: clusterName, Replicas: &replicas},
			Status:     clusterv1.MachineDeploymentStatus{ObservedGeneration: 3},
		},
		Group:  eligibility.Group{Replicas: replicas},
		Ledger: ledger,
		Sets: []*clusterv1.MachineSet{{
			ObjectMeta: metav1.ObjectMeta{Name: "small-a"}, Spec: clusterv1.MachineSetSpec{Replicas: &replicas},
		}},
		Now:        now,
		SpareGrace: time.Minute,

		ReportsNodes: func(string) bool { return true },
	}
}

func (s *Snapshot) withMachine(name, claim string, change func(*clusterv1.Machine)) *Snapshot {
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID(name), Labels: map[string]string{}, CreationTimestamp: metav1.NewTime(s.Now),
		OwnerReferences: []metav1.OwnerReference{{Kind: "MachineSet", Name: "small-a", Controller: new(true)}},
	}}
	if claim != "" {
		m.Labels[v1alpha1.ClaimLabel] = claim
	}
	if change != nil {
		change(m)
	}
	s.Machines = append(s.Machines, m)
	return s
}

func (s *Snapshot) withClaim(id string, phase v1alpha1.Phase, machine string) *Snapshot {
	c := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{Name: clusterName + "." + id, CreationTimestamp: metav1.NewTime(s.Now)},
		Spec:       v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: id, NodeGroup: "small"},
		Status:     v1alpha1.MachineClaimStatus{Phase: phase},
	}
	if machine != "" {
		c.Status.Machine = &v1alpha1.MachineReference{Name: machine, UID: types.UID(machine)}
	}
	s.Claims = append(s.Claims, c)
	return s
}

func kinds(d *Decision) []ActionKind {
	var all []ActionKind
	for _, a := range d.Actions {
		all = append(all, a.Kind)
	}
	return all
}

func infrastructure(reason string) func(*clusterv1.Machine) {
	return func(m *clusterv1.Machine) {
		m.Status.Conditions = []metav1.Condition{{
			Type: clusterv1.MachineInfrastructureReadyCondition, Status: "False", Reason: reason, Message: "no hosts left",
		}}
	}
}

func node(m *clusterv1.Machine) {
	m.Spec.ProviderID, m.Status.NodeRef.Name = "sim://"+m.Name, "node-"+m.Name
}

// booting is a Machine with an instance whose Node Cluster API has not found.
func booting(m *clusterv1.Machine) {
	m.Spec.ProviderID = "sim://" + m.Name
	inspect(m)
}
