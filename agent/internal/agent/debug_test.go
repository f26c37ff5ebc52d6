package agent_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestDebug(t *testing.T) {
	e := newEnv(t)
	id := e.CreateNodeGroup(t, conformance.MachineDeployment{Name: "workers"})
	_, err := e.Client().Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{Cluster: e.Cluster(), ClaimId: "a", Holder: "k", Candidates: []string{id}})
	fmt.Println(err)
	time.Sleep(time.Second)
	_, err = e.Client().Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: e.Cluster(), ClaimId: "a"})
	fmt.Println(err)
	for range 8 {
		time.Sleep(time.Second)
		mds, sets, ms, cl := &clusterv1.MachineDeploymentList{}, &clusterv1.MachineSetList{}, &clusterv1.MachineList{}, &v1alpha1.MachineClaimList{}
		for _, l := range []ctrlclient.ObjectList{mds, sets, ms, cl} {
			_ = plane.Client.List(t.Context(), l, ctrlclient.InNamespace(e.namespace))
		}
		md := mds.Items[0]
		fmt.Println("MD", *md.Spec.Replicas, md.Generation, md.Status.ObservedGeneration, md.Annotations)
		for _, s := range sets.Items {
			fmt.Println(" MS", *s.Spec.Replicas, s.Generation, s.Status.ObservedGeneration)
		}
		for _, m := range ms.Items {
			fmt.Println(" M", m.Name, m.Labels[v1alpha1.ClaimLabel], m.DeletionTimestamp, m.Finalizers, m.Status.Phase)
		}
		for _, c := range cl.Items {
			b, _ := json.Marshal(c.Status)
			fmt.Println(" C", string(b))
		}
	}
}
