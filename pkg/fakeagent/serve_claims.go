package fakeagent

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type claimService struct {
	agentv1alpha1.UnimplementedClaimServiceServer

	agent *Agent
}

func (s claimService) CreateClaim(
	ctx context.Context, request *agentv1alpha1.CreateClaimRequest,
) (*agentv1alpha1.CreateClaimResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.actable(ctx, cluster, request.GetHolder()); err != nil {
		return nil, err
	}
	if err := checkCandidates(cluster, request.GetCandidates()); err != nil {
		return nil, err
	}
	if _, ok := a.clusters[cluster]; !ok {
		return nil, agenterrors.ClusterNotFound(request.GetCluster())
	}
	if c, ok := a.claims[cluster][request.GetClaimId()]; ok {
		if c.phase != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
			if err := a.actable(ctx, cluster, c.holder); err != nil {
				return nil, err
			}
		}
		if !c.live() {
			return nil, agenterrors.ClaimEnded(c.render())
		}
		return &agentv1alpha1.CreateClaimResponse{Claim: c.render()}, nil
	}
	if err := a.liveSet(cluster, request.GetHolder(), request.GetSpokeId(), nil).foreign(); err != nil {
		return nil, err
	}
	if request.GetAdoptMachine() != "" {
		return a.createAdopting(cluster, request)
	}
	g, err := a.choose(cluster, request.GetHolder(), request.GetCandidates())
	if err != nil {
		return nil, err
	}
	c := a.newClaim(request, g)
	// The response shows the claim as it was made durable. Its machine's progress is seen later, as
	// with a real hub.
	response := &agentv1alpha1.CreateClaimResponse{Claim: c.render()}
	if !request.GetValidateOnly() {
		a.make(c, g)
		a.reconcile(g)
		a.publish()
	}
	return response, nil
}

// longestName is how many characters the name of a Kubernetes object may have.
const longestName = 253

// checkCandidates checks what the constraints in the API's proto files do not say.
func checkCandidates(cluster clusterKey, candidates []string) error {
	var violations []agenterrors.FieldViolation
	for i, id := range candidates {
		var description string
		switch namespace, name, _ := strings.Cut(id, "/"); {
		case namespace != cluster.namespace:
			description = fmt.Sprintf("node group %q is not in the cluster's namespace %q", id, cluster.namespace)
		case len(name) > longestName:
			description = fmt.Sprintf("%q: a MachineDeployment's name has at most %d characters", id, longestName)
		default:
			continue
		}
		violations = append(violations, agenterrors.FieldViolation{Field: fmt.Sprintf("candidates[%d]", i), Description: description})
	}
	if len(violations) > 0 {
		return agenterrors.InvalidArgument(violations...)
	}
	return nil
}

// createAdopting creates a claim that adopts an existing machine.
func (a *Agent) createAdopting(
	cluster clusterKey, request *agentv1alpha1.CreateClaimRequest,
) (*agentv1alpha1.CreateClaimResponse, error) {
	id := request.GetCandidates()[0]
	g, ok := a.groups[id]
	if !ok || g.cluster != cluster {
		return nil, agenterrors.Rejected(a.now(), agenterrors.Rejection{
			NodeGroup: id, Reason: agenterrors.ReasonNodeGroupNotFound, Message: "does not exist in this cluster or has not opted in",
		})
	}
	if availability := a.availability(g, request.GetHolder()); !availability.GetAvailable() {
		// A lack of room for another machine does not prevent an adoption.
		if rejection := g.rejection(availability); rejection.Reason == agenterrors.ReasonNotOpen {
			return nil, agenterrors.Rejected(a.now(), rejection)
		}
	}
	m, err := a.adoptable(g, request.GetAdoptMachine(), request.GetAdoptAboveMinSize())
	if err != nil {
		return nil, err
	}
	c := a.newClaim(request, g)
	response := &agentv1alpha1.CreateClaimResponse{Claim: c.render()}
	if !request.GetValidateOnly() {
		a.adopt(c, m)
		a.reconcile(g)
		a.publish()
	}
	return response, nil
}

func (s claimService) ReleaseClaim(
	ctx context.Context, request *agentv1alpha1.ReleaseClaimRequest,
) (*agentv1alpha1.ReleaseClaimResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.readable(ctx, cluster); err != nil {
		return nil, err
	}
	c, ok := a.claims[cluster][request.GetClaimId()]
	if !ok {
		if err := a.whole(cluster); err != nil {
			return nil, err
		}
		c = a.createTombstone(cluster, request.GetClaimId())
		a.publish()
	}
	if c.live() {
		if err := a.actable(ctx, cluster, c.holder); err != nil {
			return nil, err
		}
		if err := a.whole(cluster); err != nil {
			return nil, err
		}
		why := cmp.Or(request.GetReason(), "the holder asked for it")
		if c.drained = request.GetDrained(); c.drained {
			why += " (drained)"
		}
		failure := notFailed
		if request.GetFailed() {
			failure = reported
		}
		a.release(c, claimreasons.ReleaseRequested, why, failure)
		a.publish()
	}
	if c.phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING && request.GetDrained() && !c.drained {
		if err := a.actable(ctx, cluster, c.holder); err != nil {
			return nil, err
		}
		c.drained = true
		a.touchClaim(c)
		a.publish()
	}
	return &agentv1alpha1.ReleaseClaimResponse{Claim: c.render()}, nil
}

func (s claimService) ReturnMachine(
	ctx context.Context, request *agentv1alpha1.ReturnMachineRequest,
) (*agentv1alpha1.ReturnMachineResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.readable(ctx, cluster); err != nil {
		return nil, err
	}
	if _, ok := a.clusters[cluster]; !ok {
		return nil, agenterrors.ClusterNotFound(request.GetCluster())
	}
	c, ok := a.claims[cluster][request.GetClaimId()]
	if !ok {
		return nil, cmp.Or(a.whole(cluster), agenterrors.ClaimNotFound(request.GetClaimId()))
	}
	if c.phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return &agentv1alpha1.ReturnMachineResponse{Claim: c.render()}, nil
	}
	if err := a.actable(ctx, cluster, c.holder); err != nil {
		return nil, err
	}
	switch c.phase {
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING:
		return nil, agenterrors.NotReturnable("the claim has no machine yet; release it instead")
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING:
		return nil, agenterrors.NotReturnable("the claim is being released; its machine is already being removed, which cannot be undone")
	default:
	}
	if c.machine.gone || !c.machine.deletedAt.IsZero() {
		return nil, agenterrors.NotReturnable("its machine is being deleted by another actor")
	}
	if err := a.whole(cluster); err != nil {
		return nil, err
	}
	a.giveToUser(c, cmp.Or(request.GetReason(), "the holder returned it"))
	a.publish()
	return &agentv1alpha1.ReturnMachineResponse{Claim: c.render()}, nil
}

func (s claimService) GetClaim(
	ctx context.Context, request *agentv1alpha1.GetClaimRequest,
) (*agentv1alpha1.GetClaimResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.readable(ctx, cluster); err != nil {
		return nil, err
	}
	claim, ok := a.claimView.get(cluster, request.GetClaimId())
	if !ok {
		if err := a.whole(cluster); err != nil {
			return nil, err
		}
		return nil, agenterrors.ClaimNotFound(request.GetClaimId())
	}
	return &agentv1alpha1.GetClaimResponse{Claim: claim}, nil
}

func (s claimService) ListClaims(
	ctx context.Context, request *agentv1alpha1.ListClaimsRequest,
) (*agentv1alpha1.ListClaimsResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.readable(ctx, cluster); err != nil {
		return nil, err
	}
	if err := a.whole(cluster); err != nil {
		return nil, err
	}
	response := &agentv1alpha1.ListClaimsResponse{
		Claims: a.claimView.list(cluster, func(c *agentv1alpha1.Claim) bool {
			return heldBy(request.GetHolder())(c) &&
				(request.GetIncludeEnded() || c.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED)
		}),
	}
	slices.SortStableFunc(response.GetClaims(), func(x, y *agentv1alpha1.Claim) int {
		return cmp.Compare(a.claims[cluster][x.GetClaimId()].sequence, a.claims[cluster][y.GetClaimId()].sequence)
	})
	if request.GetHolder() != "" {
		response.Token = token{
			Agent: a.id, Namespace: cluster.namespace, Name: cluster.name, Holder: request.GetHolder(),
			Sequence: a.sequence, Taken: a.now(), Expired: a.expired[cluster],
		}.encode()
	}
	return response, nil
}

func (s claimService) WatchClaims(
	request *agentv1alpha1.WatchClaimsRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchClaimsResponse],
) error {
	return serve(stream.Context(), s.agent, request.GetCluster(), s.agent.readable, s.agent.claimView, heldBy(request.GetHolder()),
		encoding[*agentv1alpha1.Claim]{
			upsert: func(claim *agentv1alpha1.Claim) error {
				if claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
					claim = proto.CloneOf(claim)
					claim.History = nil
				}
				return stream.Send(&agentv1alpha1.WatchClaimsResponse{
					Event: &agentv1alpha1.WatchClaimsResponse_Upsert{Upsert: claim},
				})
			},
			removed: func(key string) error {
				return stream.Send(&agentv1alpha1.WatchClaimsResponse{
					Event: &agentv1alpha1.WatchClaimsResponse_RemovedId{RemovedId: key},
				})
			},
			synced: func(marker *agentv1alpha1.Synced) error {
				return stream.Send(&agentv1alpha1.WatchClaimsResponse{
					Event: &agentv1alpha1.WatchClaimsResponse_Synced{Synced: marker},
				})
			},
			heartbeat: func(marker *agentv1alpha1.Heartbeat) error {
				return stream.Send(&agentv1alpha1.WatchClaimsResponse{
					Event: &agentv1alpha1.WatchClaimsResponse_Heartbeat{Heartbeat: marker},
				})
			},
			resync: func(marker *agentv1alpha1.Resync) error {
				return stream.Send(&agentv1alpha1.WatchClaimsResponse{
					Event: &agentv1alpha1.WatchClaimsResponse_Resync{Resync: marker},
				})
			},
		})
}

func (s claimService) SyncClaims(
	ctx context.Context, request *agentv1alpha1.SyncClaimsRequest,
) (*agentv1alpha1.SyncClaimsResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.actable(ctx, cluster, request.GetHolder()); err != nil {
		return nil, err
	}
	reports := request.GetHolder() == shimHolder
	if !reports && len(request.GetNodes()) > 0 {
		return nil, agenterrors.PermissionDenied("Nodes are reported by the Cluster's own shim alone")
	}
	t, err := decodeToken(request.GetToken())
	if err != nil {
		return nil, agenterrors.InvalidToken("the token was not made by ListClaims")
	}
	if t.Namespace != cluster.namespace || t.Name != cluster.name || t.Holder != request.GetHolder() {
		return nil, agenterrors.InvalidToken("the token was made for another cluster or holder")
	}
	if t.Agent != a.id || t.Expired != a.expired[cluster] || a.now().Sub(t.Taken) > a.settings.tokenLifetime {
		return nil, agenterrors.StaleToken("the token is too old: take a new one")
	}
	if err := a.whole(cluster); err != nil {
		return nil, err
	}
	alive := make(map[string]struct{}, len(request.GetLiveClaimIds()))
	response := &agentv1alpha1.SyncClaimsResponse{}
	for _, id := range request.GetLiveClaimIds() {
		alive[id] = struct{}{}
		if c, ok := a.claims[cluster][id]; !ok || !c.live() {
			response.UnknownClaimIds = append(response.UnknownClaimIds, id)
		}
	}
	set := a.liveSet(cluster, request.GetHolder(), request.GetSpokeId(), alive)
	if err := set.foreign(); err != nil {
		return nil, err
	}
	set.noteNodes(request.GetNodes())
	if reports {
		a.noteShim(ctx, cluster, set)
	}
	for _, c := range set.claims {
		if set.has(c) {
			a.ownerIsBack(c)
		}
	}
	for _, c := range set.orphans(t.Sequence) {
		if why := set.keeps(c); why != "" {
			response.KeptClaimIds = append(response.KeptClaimIds, c.id)
			a.keep(c, why)
			continue
		}
		response.CollectedClaimIds = append(response.CollectedClaimIds, c.id)
		a.release(c, claimreasons.Collected, "its owner is gone: it is not in the live set of "+c.holder, notFailed)
	}
	if reports {
		a.reports[cluster] = request.GetNodes()
	}
	a.publish()
	return response, nil
}

func heldBy(holder string) func(*agentv1alpha1.Claim) bool {
	return func(c *agentv1alpha1.Claim) bool { return holder == "" || c.GetHolder() == holder }
}

// token records up to which claim a listing was complete.
type token struct {
	Agent     string    `json:"agent"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	Holder    string    `json:"holder"`
	Sequence  int64     `json:"sequence"`
	Taken     time.Time `json:"taken"`
	Expired   int64     `json:"expired"`
}

// ExpireTokens makes every token that ListClaims has returned for the Cluster too old.
func (a *Agent) ExpireTokens(cluster *agentv1alpha1.ClusterRef) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expired[keyOf(cluster)]++
}

func (t token) encode() string {
	text, err := json.Marshal(t)
	if err != nil {
		panic(err) // strings, numbers and current times always marshal
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

func decodeToken(s string) (token, error) {
	text, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		return token{}, err
	}
	var t token
	if err := json.Unmarshal(text, &t); err != nil {
		return token{}, err
	}
	return t, nil
}
