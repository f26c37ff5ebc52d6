package claims

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

func TestCollectorShowsEveryPartOfTheLedger(t *testing.T) {
	scheme := runtime.NewScheme()
	must(t, clusterv1.AddToScheme(scheme))
	must(t, v1alpha1.AddToScheme(scheme))
	l := protocol.Ledger{
		Version: protocol.LedgerVersion, Of: "fleet/workers", Seq: 7, Floor: 2, LastReplicas: 8, Spare: 1,
		Pending:   map[string]protocol.Assignment{"a": {}, "b": {Machine: "m", UID: "u"}, "c": {}},
		Releasing: map[types.UID]protocol.Release{"x": {Machine: "x"}, "y": {Machine: "y", Decremented: true}},
	}
	deployment := func(name, ledger string) *clusterv1.MachineDeployment {
		return &clusterv1.MachineDeployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name, Annotations: map[string]string{v1alpha1.LedgerAnnotation: ledger}},
			Spec:       clusterv1.MachineDeploymentSpec{Replicas: new(int32(8))},
		}
	}
	claim := func(id string, phase v1alpha1.Phase) *v1alpha1.MachineClaim {
		return &v1alpha1.MachineClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke." + id},
			Spec:       v1alpha1.MachineClaimSpec{ClusterName: "spoke", ClaimID: id, NodeGroup: "workers"},
			Status:     v1alpha1.MachineClaimStatus{Phase: phase},
		}
	}
	made, released := claim("b", v1alpha1.PhaseBound), claim("d", v1alpha1.PhaseEnded)
	made.CreationTimestamp = metav1.NewTime(newTestTime().Add(-30 * time.Second))
	released.Status.ReleasedAt = new(metav1.NewTime(newTestTime().Add(-5 * time.Minute)))
	released.Status.Machine = &v1alpha1.MachineReference{Name: "m"}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(
		deployment("workers", l.Encode()), deployment("broken", "{"), deployment("copy", l.Encode()),
		&clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "untouched"}},
		claim("a", ""), made, claim("c", v1alpha1.PhasePending), released,
		&clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke", Annotations: map[string]string{
			v1alpha1.MaxClaimsAnnotation: "5", v1alpha1.MaxReleasesAnnotation: "many",
		}}},
		&clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "other"}},
	).Build()
	err := testutil.CollectAndCompare((&Engine{Config: Config{
		Client: c, Clock: clocktesting.NewFakeClock(newTestTime()), Bounds: Bounds{Claims: 20, Releases: 3, ReleaseWindow: 10 * time.Minute},
	}}).Collector(), strings.NewReader(`
# HELP capi_agent_claims Claims by node group and phase. Ended claims are counted as long as their tombstones are kept.
# TYPE capi_agent_claims gauge
capi_agent_claims{machine_deployment="workers",namespace="fleet",phase="Bound"} 1
capi_agent_claims{machine_deployment="workers",namespace="fleet",phase="Ended"} 1
capi_agent_claims{machine_deployment="workers",namespace="fleet",phase="Pending"} 2
# HELP capi_agent_cluster_claims Claims of a Cluster by state (live: not ended; ended: tombstones). Each state has its own limit.
# TYPE capi_agent_cluster_claims gauge
capi_agent_cluster_claims{cluster="spoke",namespace="fleet",state="ended"} 1
capi_agent_cluster_claims{cluster="spoke",namespace="fleet",state="live"} 3
# HELP capi_agent_cluster_recent_releases Claims of a Cluster with a Machine that were released within the last --release-window.
# TYPE capi_agent_cluster_recent_releases gauge
capi_agent_cluster_recent_releases{cluster="spoke",namespace="fleet"} 1
# HELP capi_agent_cluster_limit Limits that a Cluster's annotations set instead of capi_agent_limit. 0 means no limit.
# TYPE capi_agent_cluster_limit gauge
capi_agent_cluster_limit{cluster="spoke",limit="live",namespace="fleet"} 5
capi_agent_cluster_limit{cluster="spoke",limit="releases",namespace="fleet"} 3
# HELP capi_agent_limit Configured limits (live, ended: claims of a Cluster; creations: claims of a node group within a minute; releases: claims of a Cluster within --release-window).
# TYPE capi_agent_limit gauge
capi_agent_limit{limit="live"} 20
capi_agent_limit{limit="releases"} 3
# HELP capi_agent_node_group_recent_creations Claims of a node group that were created within the last minute.
# TYPE capi_agent_node_group_recent_creations gauge
capi_agent_node_group_recent_creations{cluster="spoke",machine_deployment="workers",namespace="fleet"} 1
# HELP capi_agent_ledger_machines Machines of a node group by owner, according to its ledger: floor (owned by the user), spare (without an owner when the ledger was last written), pending (admitted claims without an assigned Machine), assigned (to a claim, not bound yet), releasing (being removed, replica held), replica_removed (being removed, replica removed).
# TYPE capi_agent_ledger_machines gauge
capi_agent_ledger_machines{machine_deployment="workers",namespace="fleet",part="floor"} 2
capi_agent_ledger_machines{machine_deployment="workers",namespace="fleet",part="replica_removed"} 1
capi_agent_ledger_machines{machine_deployment="workers",namespace="fleet",part="assigned"} 1
capi_agent_ledger_machines{machine_deployment="workers",namespace="fleet",part="pending"} 2
capi_agent_ledger_machines{machine_deployment="workers",namespace="fleet",part="releasing"} 1
capi_agent_ledger_machines{machine_deployment="workers",namespace="fleet",part="spare"} 1
# HELP capi_agent_ledger_sequence Number of times the ledger of a node group was written.
# TYPE capi_agent_ledger_sequence gauge
capi_agent_ledger_sequence{machine_deployment="workers",namespace="fleet"} 7
# HELP capi_agent_ledger_unreadable 1 for a node group whose ledger this agent cannot read, because a newer agent wrote it or it was edited by hand.
# TYPE capi_agent_ledger_unreadable gauge
capi_agent_ledger_unreadable{machine_deployment="broken",namespace="fleet"} 1
# HELP capi_agent_node_group_replicas spec.replicas of the MachineDeployment of a node group that has a ledger.
# TYPE capi_agent_node_group_replicas gauge
capi_agent_node_group_replicas{machine_deployment="workers",namespace="fleet"} 8
`))
	must(t, err)
}
