package protocol

import (
	"testing"

	"github.com/stretchr/testify/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Two controllers that repair the same Node remove two machines for one that is unhealthy.
func TestAMachineShowsWhetherTheHolderOfItsClaimRepairsIt(t *testing.T) {
	const none, ours, theirs = "", v1alpha1.Group, "true"
	for _, test := range []struct {
		name    string
		repairs bool
		has     string // the annotation's value
		change  func(*Snapshot)
		marks   bool
	}{
		{name: "the holder repairs, and a MachineHealthCheck may, too", repairs: true, has: none, marks: true},
		{name: "the holder repairs alone", repairs: true, has: ours},
		{name: "the holder repairs, and a person forbade it to others", repairs: true, has: theirs},
		{name: "the holder does not repair any more", has: ours, marks: true},
		{name: "a person forbade it", has: theirs},
		{name: "a MachineHealthCheck repairs", has: none},
		{name: "the claim is gone", has: ours, change: func(s *Snapshot) {
			s.Claims, s.Machines[0].Labels = nil, map[string]string{}
		}, marks: true},
		{name: "the claim is gone, and a person forbade it", has: theirs, change: func(s *Snapshot) {
			s.Claims, s.Machines[0].Labels = nil, map[string]string{}
		}},
		{name: "the claim is being released", repairs: true, has: none, change: func(s *Snapshot) {
			s.Claims[0].Status.Phase = v1alpha1.PhaseReleasing
		}},
		{name: "the claim returns the Machine", repairs: true, has: none, change: func(s *Snapshot) { s.Claims[0].Status.Returned = true }},
		{name: "another actor deletes the Machine", repairs: true, has: none, change: func(s *Snapshot) {
			s.Machines[0].DeletionTimestamp = new(metav1.NewTime(s.Now))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("m", "c", node).withClaim("c", v1alpha1.PhaseBound, "m")
			s.Claims[0].Status.Machine.NodeName = s.Machines[0].Status.NodeRef.Name
			s.Claims[0].Spec.HolderRepairs = test.repairs
			if test.has != none {
				metav1.SetMetaDataAnnotation(&s.Machines[0].ObjectMeta, clusterv1.MachineSkipRemediationAnnotation, test.has)
			}
			if test.change != nil {
				test.change(s)
			}
			if test.marks {
				assert.Contains(t, kinds(Decide(s)), MarkRepair)
				SetRepair(s.Machines[0], test.repairs)
			}
			assert.NotContains(t, kinds(Decide(s)), MarkRepair, "once")
		})
	}
}

func TestOnlyTheAgentsMarkForMachineHealthChecksIsRemoved(t *testing.T) {
	const key = clusterv1.MachineSkipRemediationAnnotation
	for has, stays := range map[string]bool{"true": true, "": true, v1alpha1.Group: false} {
		m := &clusterv1.Machine{}
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, key, has)
		SetRepair(m, true)
		assert.Equal(t, map[string]string{key: has}, m.Annotations, "what a person wrote stays as it is")
		SetRepair(m, false)
		assert.Equal(t, stays, len(m.Annotations) == 1, "%q", has)
	}
}
