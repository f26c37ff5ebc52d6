package protocol

import (
	"fmt"
	"testing"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// BenchmarkDecide decides for a group in which half of the claims wait and half are bound.
func BenchmarkDecide(b *testing.B) {
	for _, claims := range []int{1, 100, 1000} {
		b.Run(fmt.Sprintf("claims=%d", claims), func(b *testing.B) {
			ledger := (&Ledger{Version: LedgerVersion, LastReplicas: int32(claims)}).Clone()
			s := atRest(int32(claims), ledger)
			for i := range claims {
				id, machine := fmt.Sprintf("claim-%04d", i), fmt.Sprintf("machine-%04d", i)
				if i%2 == 0 {
					ledger.Pending[id] = Assignment{}
					s.withClaim(id, v1alpha1.PhasePending, "").withMachine(machine, "", nil)
				} else {
					s.withClaim(id, v1alpha1.PhaseBound, machine).withMachine(machine, id, nil)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if d := Decide(s); d.Ledger == nil {
					b.Fatal("no Machine was named")
				}
			}
		})
	}
}
