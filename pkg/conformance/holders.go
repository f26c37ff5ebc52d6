package conformance

import (
	"fmt"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// role is a kind of caller, with the holders that it may act as.
type role struct {
	name    string
	client  func(*suite) *client.Client
	holders []string
}

// heldBy are all holders that the cases below try.
var heldBy = []string{holder, otherHolder, otherHolder + "-a", "cluster-autoscalers", "a-person"}

var roles = []role{
	{"cluster", func(s *suite) *client.Client { return s.Client() }, []string{holder}},
	{"autoscaler", func(s *suite) *client.Client { return s.Autoscaler() }, []string{otherHolder, otherHolder + "-a"}},
	{"admin", func(s *suite) *client.Client { return s.Admin() }, heldBy},
}

// eachRoleAndHolder runs try for every role and holder. It must succeed if and only if the role may
// act as the holder.
func eachRoleAndHolder(s *suite, try func(tb testing.TB, caller *client.Client, held, id string) error) {
	for _, r := range roles {
		for _, held := range heldBy {
			s.run(r.name+" as "+held, func(tb testing.TB) {
				tb.Helper()
				err := try(tb, r.client(s), held, fmt.Sprintf("%s-as-%s", r.name, held))
				if lo.Contains(r.holders, held) {
					require.NoError(tb, err)
				} else {
					require.True(tb, agenterrors.IsPermissionDenied(err), "%v", err)
				}
			})
		}
	}
}

var holderCases = []testCase{
	{"holders.create", autoscaler(CallerCluster, CallerAdmin), "a claim is made only under a holder of the caller's role", func(s *suite) {
		group := s.group(deployment("workers"))
		eachRoleAndHolder(s, func(_ testing.TB, caller *client.Client, held, id string) error {
			_, err := s.create(caller, &agentv1alpha1.CreateClaimRequest{ClaimId: id, Holder: held, Candidates: []string{group}})
			return err
		})
	}},

	{"holders.adopt", fault(), "a Machine is adopted only under a holder of the caller's role", func(s *suite) {
		pairs := int32(len(roles) * len(heldBy))
		group := s.group(deployment("workers", replicas(pairs)))
		free := s.machinesOnceThereAre(group, int(pairs))
		eachRoleAndHolder(s, func(_ testing.TB, caller *client.Client, held, id string) error {
			machine := free[0].GetName()
			free = free[1:]
			_, err := s.create(caller, &agentv1alpha1.CreateClaimRequest{
				ClaimId: id, Holder: held, Candidates: []string{group}, AdoptMachine: machine,
			})
			return err
		})
	}},

	{"holders.foreign-id", autoscaler(), "the id of another holder's claim is refused", func(s *suite) {
		group := s.group(deployment("workers"))
		s.mustCreate("a-claim", group)
		request := &agentv1alpha1.CreateClaimRequest{ClaimId: "a-claim", Holder: otherHolder, Candidates: []string{group}}
		_, err := s.create(s.Autoscaler(), request)
		require.True(s, agenterrors.IsPermissionDenied(err), "%v", err)
		request.ValidateOnly = true
		_, err = s.create(s.Autoscaler(), request)
		require.True(s, agenterrors.IsPermissionDenied(err), "%v", err)
		require.Equal(s, holder, s.mustGet("a-claim").GetHolder())
	}},

	{"holders.release", autoscaler(CallerCluster, CallerAdmin), "only a claim of a holder of the caller's role is released", func(s *suite) {
		group := s.group(deployment("workers"))
		eachRoleAndHolder(s, func(tb testing.TB, caller *client.Client, held, id string) error {
			tb.Helper()
			_, err := s.create(s.Admin(), &agentv1alpha1.CreateClaimRequest{ClaimId: id, Holder: held, Candidates: []string{group}})
			require.NoError(tb, err)
			_, err = repeat(s, func() (*agentv1alpha1.ReleaseClaimResponse, error) {
				return caller.Claims.ReleaseClaim(s.bounded(), &agentv1alpha1.ReleaseClaimRequest{Cluster: s.Cluster(), ClaimId: s.id(id)})
			})
			if err != nil {
				require.Less(tb, s.mustGet(id).GetPhase(), agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING)
			}
			return err
		})
	}},

	{"holders.return", fault(), "only a machine of a holder of the caller's role is returned", func(s *suite) {
		group := s.group(deployment("workers"))
		eachRoleAndHolder(s, func(tb testing.TB, caller *client.Client, held, id string) error {
			tb.Helper()
			_, err := s.create(s.Admin(), &agentv1alpha1.CreateClaimRequest{ClaimId: id, Holder: held, Candidates: []string{group}})
			require.NoError(tb, err)
			s.untilBound(id)
			_, err = repeat(s, func() (*agentv1alpha1.ReturnMachineResponse, error) {
				return caller.Claims.ReturnMachine(s.bounded(), &agentv1alpha1.ReturnMachineRequest{Cluster: s.Cluster(), ClaimId: s.id(id)})
			})
			if err != nil {
				require.False(tb, s.mustGet(id).GetReturned())
			}
			return err
		})
	}},

	{"holders.release-ended", autoscaler(CallerCluster, CallerAdmin), "releasing an unknown or ended claim is OK whatever the role", func(s *suite) {
		group := s.group(deployment("workers"))
		s.mustCreate("ended", group)
		s.mustRelease("ended")
		s.untilEnded("ended")
		for _, r := range roles {
			for _, id := range []string{"ended", "never-made-" + r.name} {
				_, err := r.client(s).Claims.ReleaseClaim(s.bounded(), &agentv1alpha1.ReleaseClaimRequest{Cluster: s.Cluster(), ClaimId: s.id(id)})
				require.NoError(s, err, "%s %s", r.name, id)
			}
		}
	}},

	{"holders.collect", fault(), "only claims of a holder of the caller's role are collected", func(s *suite) {
		eachRoleAndHolder(s, func(_ testing.TB, caller *client.Client, held, _ string) error {
			_, err := repeat(s, func() (*agentv1alpha1.SyncClaimsResponse, error) {
				return caller.Claims.SyncClaims(s.bounded(), &agentv1alpha1.SyncClaimsRequest{
					Cluster: s.Cluster(), Holder: held, Token: s.list(held, false).GetToken(),
				})
			})
			return err
		})
	}},

	{"holders.nodes", fault(), "only the Cluster's own shim reports Nodes", func(s *suite) {
		for _, r := range roles {
			for _, held := range r.holders {
				_, err := r.client(s).Claims.SyncClaims(s.bounded(), &agentv1alpha1.SyncClaimsRequest{
					Cluster: s.Cluster(), Holder: held, Token: s.list(held, false).GetToken(),
					Nodes: []*agentv1alpha1.NodeReport{{ProviderId: "strange://node"}},
				})
				if held == holder {
					require.NoError(s, err, "%s as %s", r.name, held)
				} else {
					require.True(s, agenterrors.IsPermissionDenied(err), "%s as %s: %v", r.name, held, err)
				}
			}
		}
	}},
}
