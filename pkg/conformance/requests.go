package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/features"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var requestCases = []testCase{
	{"requests.malformed", claimer(0), "a malformed field is INVALID_ARGUMENT and is named", func(s *suite) {
		for _, m := range malformed() {
			s.run(m.method+" "+m.what, func(tb testing.TB) {
				tb.Helper()
				request := valid(m.method, s.Cluster())
				m.change(request)
				err := call(s.bounded(), s.Client(), m.method, request)
				requireViolation(tb, err, m.field)
			})
		}
	}},

	{"requests.no-cluster", claimer(0), "every call says INVALID_ARGUMENT without a Cluster", func(s *suite) {
		called := methods(s)
		if publishes(s) && slices.Contains(s.status(s.Client()).GetRoles(), string(CallerCluster)) {
			called = append(called, "ReportNodePools")
		}
		for _, method := range called {
			request := valid(method, nil)
			requireViolation(s, call(s.bounded(), s.Client(), method, request), "cluster")
		}
	}},

	{
		"requests.other-cluster", reader(1, CallerStranger),
		"another Cluster is PERMISSION_DENIED in every call, whether it exists or not", func(s *suite) {
			s.group(deployment("workers"))
			absent := &agentv1alpha1.ClusterRef{Namespace: s.Cluster().GetNamespace(), Name: "no-such-cluster"}
			called := append(methods(s), "IssueCertificate")
			if publishes(s) {
				called = append(called, "ReportNodePools")
			}
			for _, method := range called {
				err := call(s.bounded(), s.Stranger(), method, valid(method, s.Cluster()))
				require.True(s, agenterrors.IsPermissionDenied(err), "%s: %v", method, err)
				require.Equal(s, agenterrors.ReasonPermissionDenied, agenterrors.ReasonOf(err), method)
				missing := call(s.bounded(), s.Stranger(), method, valid(method, absent))
				require.True(s, agenterrors.IsPermissionDenied(missing), "%s: %v", method, missing)
				require.Equal(s, anonymous(err, s.Cluster(), absent), anonymous(missing, s.Cluster(), absent), "%s tells which Clusters exist", method)
			}
		},
	},

	{
		"requests.vanished-cluster", reader(0, CallerStranger),
		"a caller whose own Cluster does not exist gets no claims reported", func(s *suite) {
			cluster := s.nowhere()
			for _, method := range []string{"ListNodeGroups", "GetNodeGroup", "WatchNodeGroups"} {
				err := call(s.bounded(), s.Stranger(), method, valid(method, cluster))
				require.True(s, agenterrors.IsPermissionDenied(err), "%s: %v", method, err)
			}
			err := call(s.bounded(), s.Stranger(), "CreateClaim", valid("CreateClaim", cluster))
			require.True(s, agenterrors.IsNotFound(err), "%v", err)
			require.Equal(s, agenterrors.ReasonClusterNotFound, agenterrors.ReasonOf(err))
			// The Cluster may have moved to another hub, with its claims and Machines.
			for _, method := range []string{"ReleaseClaim", "ReturnMachine", "GetClaim", "ListClaims", "GetMachine", "ListMachines"} {
				err = call(s.bounded(), s.Stranger(), method, valid(method, cluster))
				require.Equal(s, agenterrors.ReasonClusterNotFound, agenterrors.ReasonOf(err), "%s: %v", method, err)
			}
		},
	},
}

// nowhere returns the Cluster that the stranger may act for.
func (s *suite) nowhere() *agentv1alpha1.ClusterRef {
	s.Helper()
	clusters := s.status(s.Stranger()).GetClusters()
	require.Len(s, clusters, 1)
	return clusters[0]
}

// anonymous returns the message of err without the Clusters' names. A name may also be a word of
// the message.
func anonymous(err error, clusters ...*agentv1alpha1.ClusterRef) string {
	message := innermost(err).Message()
	for _, cluster := range clusters {
		message = strings.ReplaceAll(message, cluster.GetName(), "…")
	}
	return message
}

// innermost returns the status as received, without what the client has wrapped around it.
func innermost(err error) *status.Status {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return status.Convert(err)
		}
		err = inner
	}
}

// methods returns the names of the methods that name a Cluster and that the agent serves, except
// IssueCertificate and ReportNodePools: an administrator may call every method but those.
func methods(s *suite) []string {
	s.Helper()
	names := []string{
		"ListNodeGroups", "GetNodeGroup", "WatchNodeGroups",
		"CreateClaim", "ReleaseClaim", "ReturnMachine", "GetClaim", "ListClaims", "WatchClaims", "SyncClaims",
		"GetMachine", "ListMachines", "WatchMachines",
	}
	if publishes(s) {
		names = append(names, "ListPublishedObjects", "WatchPublishedObjects")
	}
	return names
}

// publishes reports whether the agent serves NodePoolService.
func publishes(s *suite) bool {
	s.Helper()
	return slices.Contains(s.status(s.Client()).GetFeatures(), features.NodePools)
}

func (s *suite) status(c *client.Client) *agentv1alpha1.GetStatusResponse {
	s.Helper()
	response, err := c.Status.GetStatus(s.bounded(), &agentv1alpha1.GetStatusRequest{})
	require.NoError(s, err)
	return response
}

// valid returns a request that is valid if its Cluster is.
func valid(method string, cluster *agentv1alpha1.ClusterRef) proto.Message {
	cluster = proto.CloneOf(cluster)
	group := "default/workers"
	if cluster != nil {
		group = cluster.GetNamespace() + "/workers"
	}
	switch method {
	case "ListNodeGroups":
		return &agentv1alpha1.ListNodeGroupsRequest{Cluster: cluster}
	case "GetNodeGroup":
		return &agentv1alpha1.GetNodeGroupRequest{Cluster: cluster, Id: group}
	case "WatchNodeGroups":
		return &agentv1alpha1.WatchNodeGroupsRequest{Cluster: cluster}
	case "CreateClaim":
		return &agentv1alpha1.CreateClaimRequest{Cluster: cluster, ClaimId: "a-claim", Holder: holder, Candidates: []string{group}}
	case "ReleaseClaim":
		return &agentv1alpha1.ReleaseClaimRequest{Cluster: cluster, ClaimId: "a-claim"}
	case "ReturnMachine":
		return &agentv1alpha1.ReturnMachineRequest{Cluster: cluster, ClaimId: "a-claim"}
	case "GetClaim":
		return &agentv1alpha1.GetClaimRequest{Cluster: cluster, ClaimId: "a-claim"}
	case "ListClaims":
		return &agentv1alpha1.ListClaimsRequest{Cluster: cluster}
	case "WatchClaims":
		return &agentv1alpha1.WatchClaimsRequest{Cluster: cluster}
	case "SyncClaims":
		return &agentv1alpha1.SyncClaimsRequest{Cluster: cluster, Holder: holder, Token: "token"}
	case "GetMachine":
		return &agentv1alpha1.GetMachineRequest{Cluster: cluster, Name: "a-machine"}
	case "ListMachines":
		return &agentv1alpha1.ListMachinesRequest{Cluster: cluster}
	case "WatchMachines":
		return &agentv1alpha1.WatchMachinesRequest{Cluster: cluster}
	case "ListPublishedObjects":
		return &agentv1alpha1.ListPublishedObjectsRequest{Cluster: cluster}
	case "WatchPublishedObjects":
		return &agentv1alpha1.WatchPublishedObjectsRequest{Cluster: cluster}
	case "ReportNodePools":
		return &agentv1alpha1.ReportNodePoolsRequest{Cluster: cluster}
	case "IssueCertificate":
		// It is not a signing request, which is checked only after the caller's rights.
		return &agentv1alpha1.IssueCertificateRequest{Cluster: cluster, SigningRequest: []byte("none")}
	}
	panic("no method " + method)
}

// call makes the call. For a stream it waits for the first event.
func call(ctx context.Context, c *client.Client, method string, request proto.Message) error {
	switch r := request.(type) {
	case *agentv1alpha1.ListNodeGroupsRequest:
		return unary(ctx, r, c.NodeGroups.ListNodeGroups)
	case *agentv1alpha1.GetNodeGroupRequest:
		return unary(ctx, r, c.NodeGroups.GetNodeGroup)
	case *agentv1alpha1.WatchNodeGroupsRequest:
		return firstEvent(ctx, r, c.NodeGroups.WatchNodeGroups)
	case *agentv1alpha1.CreateClaimRequest:
		return unary(ctx, r, c.Claims.CreateClaim)
	case *agentv1alpha1.ReleaseClaimRequest:
		return unary(ctx, r, c.Claims.ReleaseClaim)
	case *agentv1alpha1.ReturnMachineRequest:
		return unary(ctx, r, c.Claims.ReturnMachine)
	case *agentv1alpha1.GetClaimRequest:
		return unary(ctx, r, c.Claims.GetClaim)
	case *agentv1alpha1.ListClaimsRequest:
		return unary(ctx, r, c.Claims.ListClaims)
	case *agentv1alpha1.WatchClaimsRequest:
		return firstEvent(ctx, r, c.Claims.WatchClaims)
	case *agentv1alpha1.SyncClaimsRequest:
		return unary(ctx, r, c.Claims.SyncClaims)
	case *agentv1alpha1.GetMachineRequest:
		return unary(ctx, r, c.Machines.GetMachine)
	case *agentv1alpha1.ListMachinesRequest:
		return unary(ctx, r, c.Machines.ListMachines)
	case *agentv1alpha1.WatchMachinesRequest:
		return firstEvent(ctx, r, c.Machines.WatchMachines)
	case *agentv1alpha1.ListPublishedObjectsRequest:
		return unary(ctx, r, c.NodePools.ListPublishedObjects)
	case *agentv1alpha1.WatchPublishedObjectsRequest:
		return firstEvent(ctx, r, c.NodePools.WatchPublishedObjects)
	case *agentv1alpha1.ReportNodePoolsRequest:
		return unary(ctx, r, c.NodePools.ReportNodePools)
	case *agentv1alpha1.IssueCertificateRequest:
		return unary(ctx, r, c.Issuer.IssueCertificate)
	}
	return fmt.Errorf("%s takes no %T", method, request)
}

func unary[Request, Response any](
	ctx context.Context, request Request, method func(context.Context, Request, ...grpc.CallOption) (Response, error),
) error {
	_, err := method(ctx, request)
	return err
}

func firstEvent[Request, Response any](
	ctx context.Context, request Request,
	method func(context.Context, Request, ...grpc.CallOption) (grpc.ServerStreamingClient[Response], error),
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := method(ctx, request)
	if err != nil {
		return err
	}
	if _, err = stream.Recv(); errors.Is(err, io.EOF) {
		return errors.New("the stream ended without an event")
	}
	return err
}

// malformation makes one field of a valid request malformed.
type malformation struct {
	method, what, field string
	change              func(proto.Message)
}

// with returns a malformation of the request type that change takes.
func with[Request proto.Message](method, what, field string, change func(Request)) malformation {
	return malformation{method: method, what: what, field: field, change: func(request proto.Message) {
		r, ok := request.(Request)
		if !ok {
			panic(fmt.Sprintf("%s takes %T", method, request))
		}
		change(r)
	}}
}

// text returns malformations of a string field. The keys of values describe what is wrong.
func text[Request proto.Message](method, field string, set func(Request, string), values map[string]string) []malformation {
	var all []malformation
	for what, value := range values {
		all = append(all, with(method, field+": "+what, field, func(r Request) { set(r, value) }))
	}
	return all
}

func malformed() []malformation {
	label := map[string]string{
		"empty": "", "upper case": "Claim", "a slash": "a/b", "a dot": "a.b", "a leading hyphen": "-a", "a trailing hyphen": "a-",
		"64 characters": strings.Repeat("a", 64),
	}
	reserved := map[string]string{"the one of claims whose holder was lost": "unknown"}
	name := map[string]string{
		"empty": "", "upper case": "Name", "a slash": "a/b", "a leading hyphen": "-a", "64 characters": strings.Repeat("a", 64),
	}
	type (
		create   = *agentv1alpha1.CreateClaimRequest
		release  = *agentv1alpha1.ReleaseClaimRequest
		returns  = *agentv1alpha1.ReturnMachineRequest
		get      = *agentv1alpha1.GetClaimRequest
		sync     = *agentv1alpha1.SyncClaimsRequest
		group    = *agentv1alpha1.GetNodeGroupRequest
		machine  = *agentv1alpha1.GetMachineRequest
		machines = *agentv1alpha1.ListMachinesRequest
		list     = *agentv1alpha1.ListClaimsRequest
		watch    = *agentv1alpha1.WatchClaimsRequest
		groups   = *agentv1alpha1.ListNodeGroupsRequest
	)
	return slices.Concat(
		text("ListNodeGroups", "cluster.namespace", func(r groups, v string) { r.Cluster.Namespace = v }, label),
		text("ListNodeGroups", "cluster.name", func(r groups, v string) { r.Cluster.Name = v }, name),
		text("GetNodeGroup", "id", func(r group, v string) { r.Id = v },
			map[string]string{"empty": "", "318 characters": strings.Repeat("a", 318)}),

		text("CreateClaim", "claim_id", func(r create, v string) { r.ClaimId = v }, label),
		text("CreateClaim", "holder", func(r create, v string) { r.Holder = v }, label),
		text("CreateClaim", "holder", func(r create, v string) { r.Holder = v }, reserved),
		text("CreateClaim", "spoke_id", func(r create, v string) { r.SpokeId = v },
			map[string]string{"64 characters": strings.Repeat("a", 64), "no label": "!"}),
		[]malformation{
			with("CreateClaim", "max_node_provision_time: nine seconds", "max_node_provision_time",
				func(r create) { r.MaxNodeProvisionTime = durationpb.New(9 * time.Second) }),
			with("CreateClaim", "max_node_provision_time: more than a week", "max_node_provision_time",
				func(r create) { r.MaxNodeProvisionTime = durationpb.New(7*24*time.Hour + time.Second) }),
		},
		text("CreateClaim", "display_name", func(r create, v string) { r.DisplayName = v },
			map[string]string{"254 bytes": strings.Repeat("ä", 127), "a control character": "a\x1b[2J", "two lines": "a\nb"}),
		text("CreateClaim", "candidates[0]", func(r create, v string) { r.Candidates = []string{v} },
			map[string]string{
				"empty": "", "no namespace": "/workers", "no name": "default/", "no slash": "workers", "two slashes": "a/b/c",
				"318 characters": "a/" + strings.Repeat("b", 316), "dots": "fleet/..", "a trailing dot": "fleet/a.", "a percent sign": "fleet/%",
				"upper case": "fleet/Workers", "not ASCII": "fleet/ä", "a namespace with a dot": "a.b/workers",
			}),
		[]malformation{
			with("CreateClaim", "no candidates", "candidates", func(r create) { r.Candidates = nil }),
			with("CreateClaim", "a candidate twice", "candidates", func(r create) {
				r.Candidates = append(r.Candidates, r.GetCandidates()[0])
			}),
			with("CreateClaim", "1001 candidates", "candidates", func(r create) {
				r.Candidates = nil
				for i := range 1001 {
					r.Candidates = append(r.Candidates, fmt.Sprintf("%s/g%d", r.GetCluster().GetNamespace(), i))
				}
			}),
		},

		text("ReleaseClaim", "claim_id", func(r release, v string) { r.ClaimId = v }, label),
		text("ReleaseClaim", "reason", func(r release, v string) { r.Reason = v },
			map[string]string{"1025 characters": strings.Repeat("a", 1025)}),
		text("ReturnMachine", "claim_id", func(r returns, v string) { r.ClaimId = v }, label),
		text("ReturnMachine", "reason", func(r returns, v string) { r.Reason = v },
			map[string]string{"1025 characters": strings.Repeat("a", 1025)}),
		text("GetClaim", "claim_id", func(r get, v string) { r.ClaimId = v }, label),
		text("ListClaims", "holder", func(r list, v string) { r.Holder = v },
			map[string]string{"64 characters": strings.Repeat("a", 64), "no label": "!"}),
		text("WatchClaims", "holder", func(r watch, v string) { r.Holder = v },
			map[string]string{"64 characters": strings.Repeat("a", 64), "no label": "!"}),

		text("SyncClaims", "holder", func(r sync, v string) { r.Holder = v }, label),
		text("SyncClaims", "holder", func(r sync, v string) { r.Holder = v }, reserved),
		text("SyncClaims", "spoke_id", func(r sync, v string) { r.SpokeId = v },
			map[string]string{"64 characters": strings.Repeat("a", 64), "no label": "!"}),
		text("SyncClaims", "token", func(r sync, v string) { r.Token = v },
			map[string]string{"empty": "", "1025 characters": strings.Repeat("a", 1025)}),
		text("SyncClaims", "live_claim_ids[1]", func(r sync, v string) { r.LiveClaimIds = []string{"ok", v} },
			map[string]string{"empty": "", "64 characters": strings.Repeat("a", 64)}),
		text("SyncClaims", "nodes[0].provider_id", func(r sync, v string) {
			r.Nodes = []*agentv1alpha1.NodeReport{{ProviderId: v}}
		}, map[string]string{"empty": "", "2049 characters": strings.Repeat("a", 2049)}),

		text("GetMachine", "name", func(r machine, v string) { r.Name = v },
			map[string]string{"empty": "", "254 characters": strings.Repeat("a", 254)}),
		text("ListMachines", "node_group_id", func(r machines, v string) { r.NodeGroupId = v },
			map[string]string{"318 characters": strings.Repeat("a", 318)}),
	)
}

// requireViolation asserts that err is INVALID_ARGUMENT and names the field.
func requireViolation(t require.TestingT, err error, field string) {
	if helper, ok := t.(interface{ Helper() }); ok {
		helper.Helper()
	}
	require.True(t, agenterrors.IsInvalidArgument(err), "%s: %v", field, err)
	violations := agenterrors.FieldViolations(err)
	i := slices.IndexFunc(violations, func(v agenterrors.FieldViolation) bool { return v.Field == field })
	require.GreaterOrEqual(t, i, 0, "%s is not among %v", field, violations)
	require.NotEmpty(t, violations[i].Description)
}
