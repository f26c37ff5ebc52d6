package invariants

import (
	"math"
	"slices"

	"github.com/samber/lo"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Rules about what users and holders own, independently of the ledger.
const (
	NothingLeaked  Rule = "every Machine was requested"
	NothingTaken   Rule = "no Machine is removed unrequested"
	UnwantedClaims Rule = "no claim outlives its holder's wish"
	WantedClaims   Rule = "no claim ends that its holder wants"
)

// Share is the number of a node group's machines that belong to users according to their own
// records: at least Own, and up to Unclear more if they destroyed the evidence.
type Share struct {
	Own, Unclear int32
}

// Expected is what users and holders of claims know. Unlike the rest of the package, which trusts
// the ledger, it also reveals a wrong ledger.
type Expected struct {
	// Shares by MachineDeployment. Others are not checked.
	Shares map[string]Share
	// Wanted are the ids of the claims that their holder has not released.
	Wanted []string
	// Holder is the holder whose claims are compared with Wanted.
	Holder string
}

// Against returns the differences from the expected state at rest. Count is the number of surplus
// or missing machines or claims.
func (s State) Against(e Expected) []Violation {
	var f findings
	claims := map[string]int32{}
	alive := map[string]bool{}
	for i := range s.Claims {
		c := &s.Claims[i]
		if !live(c) {
			continue
		}
		wanted := c.Spec.Holder != e.Holder || slices.Contains(e.Wanted, c.Spec.ClaimID)
		if !wanted {
			f.add(UnwantedClaims, "MachineClaim", c.Name, "lives (%s: %s), and its holder has released it or never made it",
				c.CurrentPhase(), c.Status.Message)
			continue
		}
		alive[c.Spec.ClaimID] = true
		claims[c.Spec.NodeGroup]++
	}
	for _, id := range e.Wanted {
		if !alive[id] {
			f.add(WantedClaims, "claim", id, "has ended or is not there, and its holder wants it")
		}
	}
	for i := range s.Deployments {
		md := &s.Deployments[i]
		share, known := e.Shares[md.Name]
		if !known {
			continue
		}
		machines := int32(min(math.MaxInt32, lo.CountBy(s.Machines, func(m clusterv1.Machine) bool {
			return m.Labels[clusterv1.MachineDeploymentNameLabel] == md.Name
		})))
		least := max(share.Own, size(md, clusterv1.AutoscalerMinSizeAnnotation, 0)) + claims[md.Name]
		switch most := least + share.Unclear; {
		case machines > most:
			f.count(machines-most, NothingLeaked, "MachineDeployment", md.Name,
				"has %d Machines for %d of its user and %d wanted claims (%d unclear)", machines, share.Own, claims[md.Name], share.Unclear)
		case machines < least:
			f.count(least-machines, NothingTaken, "MachineDeployment", md.Name,
				"has %d Machines for %d of its user and %d wanted claims", machines, share.Own, claims[md.Name])
		}
	}
	return f
}

// labelOf returns the claim that the Machine is bound to, or "".
func labelOf(m *clusterv1.Machine) string { return m.Labels[agentv1.ClaimLabel] }
