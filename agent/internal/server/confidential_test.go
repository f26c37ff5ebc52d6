package server_test

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/autoscaler"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/issuer"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// words are what must not cross the border: each of the hub's errors below contains some of them.
var words = regexp.MustCompile(`(?i)internal\.example|\.svc|10\.96\.|serviceaccount|webhook|AdmissionPolicy|policies|account 1234|` +
	`exceeded quota|etcd|x509|someone-elses|no matches for kind|is forbidden|request entity`)

// hubsErrors are what the hub's API server answers, and what else may go wrong on the way to it.
func hubsErrors() map[string]error {
	claim := schema.GroupResource{Group: v1alpha1.Group, Resource: "machineclaims"}
	denied := func(text string) error { return apierrors.NewForbidden(claim, "someone-elses", errors.New(text)) }
	return map[string]error{
		"a webhook denies": denied(`admission webhook "guard.policies.internal.example" denied the request: account 1234`),
		"a webhook does not answer": apierrors.NewInternalError(errors.New(`failed calling webhook "guard.policies.internal.example": ` +
			`failed to call webhook: Post "https://guard.policies.svc:443/validate?timeout=10s": dial tcp 10.96.3.4:443: connect: connection refused`)),
		"a conversion webhook fails": apierrors.NewInternalError(errors.New(`conversion webhook for cluster.x-k8s.io/v1beta1, Kind=Machine failed: ` +
			`Post "https://capi-webhook-service.capi-system.svc:443/convert?timeout=30s": x509: certificate has expired`)),
		"a policy denies": denied("ValidatingAdmissionPolicy 'fleet-guard' with binding 'all' denied request: see https://policies.internal.example"),
		"no right":        denied(`User "system:serviceaccount:capi-agent-system:capi-agent" cannot create resource "machineclaims"`),
		"a quota":         denied("exceeded quota: team-b, requested: count/machineclaims=1, used: count/machineclaims=7, limited: count/machineclaims=7"),
		"invalid": apierrors.NewInvalid(schema.GroupKind{Group: claim.Group, Kind: "MachineClaim"}, "someone-elses", field.ErrorList{
			field.Invalid(field.NewPath("spec"), "account 1234", "no"),
		}),
		"a conflict":          apierrors.NewConflict(claim, "someone-elses", errors.New("the object has been modified")),
		"it exists":           apierrors.NewAlreadyExists(claim, "someone-elses"),
		"it does not exist":   apierrors.NewNotFound(claim, "someone-elses"),
		"not authenticated":   apierrors.NewUnauthorized("the token of serviceaccount capi-agent has expired"),
		"too large":           apierrors.NewRequestEntityTooLargeError("request entity: etcdserver: request is too large"),
		"no space":            apierrors.NewInternalError(errors.New("etcdserver: mvcc: database space exceeded")),
		"a timeout":           apierrors.NewTimeoutError("etcdserver: request timed out", 1),
		"another timeout":     apierrors.NewServerTimeout(claim, "list of someone-elses", 1),
		"too many requests":   apierrors.NewTooManyRequests("the webhook has received too many requests", 1),
		"unavailable":         apierrors.NewServiceUnavailable("etcd has no leader"),
		"expired":             apierrors.NewResourceExpired("etcd: the requested revision has been compacted"),
		"method not allowed":  apierrors.NewMethodNotSupported(claim, "someone-elses"),
		"a status of its own": &apierrors.StatusError{ErrStatus: metav1.Status{Code: 418, Message: "proxy.internal.example: account 1234"}},
		"no such kind":        &meta.NoKindMatchError{GroupKind: schema.GroupKind{Group: v1alpha1.Group, Kind: "Spoke"}},
		"no connection": &url.Error{Op: "Get", URL: "https://10.96.0.1:443/apis/cluster.x-k8s.io", Err: &net.OpError{
			Op: "dial", Err: errors.New("connection refused by hub.internal.example"),
		}},
		"no such host":     &net.DNSError{Err: "no such host", Name: "hub.internal.example", Server: "10.96.0.10:53"},
		"no trust":         &url.Error{Op: "Post", URL: "https://hub.internal.example", Err: x509.UnknownAuthorityError{}},
		"the rate limiter": fmt.Errorf("client rate limiter Wait returned an error for hub.internal.example: %w", context.DeadlineExceeded),
		"the agent's own rate": errors.New(
			"client rate limiter Wait returned an error for hub.internal.example: rate: Wait(n=1) would exceed context deadline"),
		"a write that is refused for good": fmt.Errorf("making the claim: %w: %w", claims.ErrWriteRefused,
			denied(`admission webhook "guard.policies.internal.example" denied the request`)),
		"a race":                 fmt.Errorf("binding: %w: %w", claims.ErrConflict, apierrors.NewConflict(claim, "someone-elses", errors.New("no"))),
		"a newer agent's ledger": fmt.Errorf("MachineDeployment someone-elses: %w", protocol.ErrNewerLedger),
		"a bug":                  errors.New("index out of range in someone-elses"),
	}
}

// failing is an engine that fails like the hub.
type failing struct {
	why *atomic.Pointer[error]
	// cluster returns the error of a live read of a Cluster.
	cluster func() error
}

func (f failing) err() error { return *f.why.Load() }

func (f failing) Create(context.Context, claims.Request) (*v1alpha1.MachineClaim, error) {
	return nil, f.err()
}

func (f failing) Release(context.Context, claims.Key, claims.ReleaseOptions) (*v1alpha1.MachineClaim, error) {
	return nil, f.err()
}

func (f failing) Return(context.Context, claims.Key, claims.Holders, string) (*v1alpha1.MachineClaim, error) {
	return nil, f.err()
}

func (f failing) Get(context.Context, claims.Key) (*v1alpha1.MachineClaim, error) {
	return nil, f.err()
}

func (f failing) List(context.Context, claims.ListOptions) ([]v1alpha1.MachineClaim, string, error) {
	return nil, "", f.err()
}

func (f failing) Sync(context.Context, claims.SyncRequest) (claims.SyncResult, error) {
	return claims.SyncResult{}, f.err()
}

func (f failing) UnpausedCluster(context.Context, types.NamespacedName) (*clusterv1.Cluster, error) {
	return &clusterv1.Cluster{}, f.cluster()
}

// requests are valid requests for all methods whose answers depend on the hub, or on the caches of
// it. Each caller is a path of a SPIFFE id.
var requests = map[string]struct {
	caller   string
	request  proto.Message
	response proto.Message
}{
	agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.ListNodeGroupsRequest{Cluster: spokeRef}, &agentv1alpha1.ListNodeGroupsResponse{},
	},
	agentv1alpha1.NodeGroupService_GetNodeGroup_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.GetNodeGroupRequest{Cluster: spokeRef, Id: "fleet/a"}, &agentv1alpha1.GetNodeGroupResponse{},
	},
	agentv1alpha1.NodeGroupService_WatchNodeGroups_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef}, &agentv1alpha1.WatchNodeGroupsResponse{},
	},
	agentv1alpha1.ClaimService_CreateClaim_FullMethodName: {
		"/cluster/fleet/spoke",
		&agentv1alpha1.CreateClaimRequest{Cluster: spokeRef, ClaimId: "a", Holder: "karpenter", Candidates: []string{"fleet/a"}},
		&agentv1alpha1.CreateClaimResponse{},
	},
	agentv1alpha1.ClaimService_ReleaseClaim_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.ReleaseClaimRequest{Cluster: spokeRef, ClaimId: "a"}, &agentv1alpha1.ReleaseClaimResponse{},
	},
	agentv1alpha1.ClaimService_ReturnMachine_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.ReturnMachineRequest{Cluster: spokeRef, ClaimId: "a"}, &agentv1alpha1.ReturnMachineResponse{},
	},
	agentv1alpha1.ClaimService_SyncClaims_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.SyncClaimsRequest{Cluster: spokeRef, Holder: "karpenter", Token: "t"}, &agentv1alpha1.SyncClaimsResponse{},
	},
	agentv1alpha1.ClaimService_GetClaim_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.GetClaimRequest{Cluster: spokeRef, ClaimId: "a"}, &agentv1alpha1.GetClaimResponse{},
	},
	agentv1alpha1.ClaimService_ListClaims_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.ListClaimsRequest{Cluster: spokeRef}, &agentv1alpha1.ListClaimsResponse{},
	},
	agentv1alpha1.ClaimService_WatchClaims_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.WatchClaimsRequest{Cluster: spokeRef}, &agentv1alpha1.WatchClaimsResponse{},
	},
	agentv1alpha1.MachineService_GetMachine_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.GetMachineRequest{Cluster: spokeRef, Name: "m"}, &agentv1alpha1.GetMachineResponse{},
	},
	agentv1alpha1.MachineService_ListMachines_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.ListMachinesRequest{Cluster: spokeRef}, &agentv1alpha1.ListMachinesResponse{},
	},
	agentv1alpha1.MachineService_WatchMachines_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.WatchMachinesRequest{Cluster: spokeRef}, &agentv1alpha1.WatchMachinesResponse{},
	},
	agentv1alpha1.ClusterService_ListClusters_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.ListClustersRequest{}, &agentv1alpha1.ListClustersResponse{},
	},
	agentv1alpha1.ClusterService_WatchClusters_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.WatchClustersRequest{}, &agentv1alpha1.WatchClustersResponse{},
	},
	agentv1alpha1.NodePoolService_ListPublishedObjects_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.ListPublishedObjectsRequest{Cluster: spokeRef}, &agentv1alpha1.ListPublishedObjectsResponse{},
	},
	agentv1alpha1.NodePoolService_WatchPublishedObjects_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.WatchPublishedObjectsRequest{Cluster: spokeRef}, &agentv1alpha1.WatchPublishedObjectsResponse{},
	},
	agentv1alpha1.NodePoolService_ReportNodePools_FullMethodName: {
		"/cluster/fleet/spoke", &agentv1alpha1.ReportNodePoolsRequest{Cluster: spokeRef}, &agentv1alpha1.ReportNodePoolsResponse{},
	},
	agentv1alpha1.CertificateService_IssueCertificate_FullMethodName: {
		"/bootstrap/fleet/spoke/abcdefgh", &agentv1alpha1.IssueCertificateRequest{Cluster: spokeRef}, &agentv1alpha1.IssueCertificateResponse{},
	},
	externalgrpc.CloudProvider_Refresh_FullMethodName: {
		"/autoscaler", &externalgrpc.RefreshRequest{}, &externalgrpc.RefreshResponse{},
	},
	externalgrpc.CloudProvider_NodeGroupIncreaseSize_FullMethodName: {
		"/autoscaler", &externalgrpc.NodeGroupIncreaseSizeRequest{Id: "fleet/scaled", Delta: 1}, &externalgrpc.NodeGroupIncreaseSizeResponse{},
	},
	externalgrpc.CloudProvider_NodeGroupDecreaseTargetSize_FullMethodName: {
		"/autoscaler", &externalgrpc.NodeGroupDecreaseTargetSizeRequest{Id: "fleet/scaled", Delta: -1}, &externalgrpc.NodeGroupDecreaseTargetSizeResponse{},
	},
	externalgrpc.CloudProvider_NodeGroupDeleteNodes_FullMethodName: {
		"/autoscaler",
		&externalgrpc.NodeGroupDeleteNodesRequest{Id: "fleet/scaled", Nodes: []*externalgrpc.ExternalGrpcNode{{ProviderID: "test://m", Name: "m"}}},
		&externalgrpc.NodeGroupDeleteNodesResponse{},
	},
}

// fromMemory are the methods that are answered from the views alone, for callers whose certificates
// belong to no onboarding: the hub has no part in their errors.
func fromMemory(method string) bool {
	rule := authz.Methods[method]
	return rule.Anyone || rule.Everyone || strings.HasPrefix(method, "/"+externalgrpc.CloudProvider_ServiceDesc.ServiceName+"/")
}

// The words with which the hub's API server, its webhooks and its policies answer the agent never
// reach a caller, in no method: there are as many texts as docs/security.md lists, and the agent's
// log has the rest, under the id of the request.
func TestWhatTheHubAnswersStaysInTheHub(t *testing.T) {
	why := &atomic.Pointer[error]{}
	fine := error(nil)
	why.Store(&fine)
	// broken is the source of the agent's that fails: all but the cache of onboardings, that cache,
	// or the records of enrollments.
	var broken atomic.Value
	broken.Store("")
	from := func(source string) error {
		if broken.Load() == source {
			return *why.Load()
		}
		return nil
	}
	onboarding := func(source string) server.OnboardingOf {
		return func(context.Context, types.NamespacedName) (string, bool, error) {
			id := ""
			if source == "hub" {
				id = "abcdefgh" // of the bootstrap certificate
			}
			return id, true, from(source)
		}
	}
	f := start(t, func(f *fixture, c *server.Config) {
		policy, err := authz.ParsePolicy([]byte(
			"identities:\n- id: spiffe://karpenter-capi/autoscaler\n  roles: [autoscaler]\n  clusters: [fleet/spoke]\n"), "karpenter-capi")
		require.NoError(t, err)
		c.Authorizer, err = authz.New("karpenter-capi", func() *authz.Policy { return policy }, clock.RealClock{})
		require.NoError(t, err)
		held := watchcache.New(watchcache.Options[nodegroup.NodeGroup]{
			Equal: func(_, _ nodegroup.NodeGroup) bool { return false }, Buffer: 1, Heartbeat: time.Minute,
		})
		held.SetReady()
		held.Set(spoke, "fleet/scaled", nodegroup.NodeGroup{
			Key: types.NamespacedName{Namespace: "fleet", Name: "scaled"}, Cluster: spoke, Limits: eligibility.Group{Holder: autoscaler.Holder, Replicas: 2},
		})
		for id, machine := range map[string]*agentv1alpha1.Machine{"open": nil, "joined": {Name: "m", ProviderId: "test://m", NodeName: "m"}} {
			f.claims.Set(spoke, id, &agentv1alpha1.Claim{
				ClaimId: id, Holder: autoscaler.Holder, NodeGroupId: "fleet/scaled", Machine: machine, Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND,
			})
		}
		engine := failing{why: why, cluster: func() error {
			if broken.Load() == "enrollments" { // what follows the read
				return nil
			}
			return *why.Load()
		}}
		c.Engine = engine
		c.Autoscaler = autoscaler.New(autoscaler.Config{Engine: engine, Groups: held, Claims: f.claims})
		c.NodePools = &server.NodePools{
			Cache: newCache[*agentv1alpha1.PublishedObject](4),
			List: func(context.Context, *clusterv1.Cluster) ([]*agentv1alpha1.PublishedObject, []string, error) {
				return nil, nil, *why.Load()
			},
			Report: func(context.Context, *clusterv1.Cluster, spokes.Report) error { return *why.Load() },
		}
		c.NodePools.Cache.SetReady()
		c.Onboarded, c.OnboardedLive = onboarding("cache"), onboarding("hub")
		c.Issuing = &server.Issuing{
			TrustDomain: "karpenter-capi", Lifetime: time.Hour,
			Enroll: func(context.Context, authz.Onboarding, string) error { return from("enrollments") },
			Issue: func(crypto.PublicKey, spiffeid.ID, time.Duration) (issuer.Certificate, error) {
				return issuer.Certificate{}, nil
			},
		}
	})
	f.nodeGroups.Set(spoke, "fleet/a", &agentv1alpha1.NodeGroup{Id: "fleet/a"})
	conns := map[string]*grpc.ClientConn{}
	for _, path := range []string{"/cluster/fleet/spoke", "/bootstrap/fleet/spoke/abcdefgh", "/autoscaler"} {
		conns[path] = rawConn(t, f, "spiffe://karpenter-capi"+path)
	}
	signing := testpki.SigningRequest(t)

	for method := range authz.Methods {
		_, known := requests[method]
		require.True(t, known || fromMemory(method), "%s: the table of requests has a valid one", method)
	}
	closed, seen, failed, logged := closedSet(t), map[string]bool{}, map[string]bool{}, map[string]string{}
	for _, source := range []string{"hub", "cache", "enrollments"} {
		broken.Store(source)
		for name, cause := range hubsErrors() {
			why.Store(&cause)
			for method, call := range requests {
				request := proto.Clone(call.request)
				switch certificate, ok := request.(*agentv1alpha1.IssueCertificateRequest); {
				case ok:
					certificate.SigningRequest = signing
				case source == "enrollments":
					continue
				}
				id := strings.NewReplacer(" ", "-", "'", "-").Replace(source + method + ":" + name)
				ctx := metadata.AppendToOutgoingContext(f.ctx(), client.RequestIDKey, id)
				status := grpcstatus.Convert(invoke(ctx, conns[call.caller], method, request, proto.Clone(call.response)))
				if status.Code() == codes.OK {
					continue // the answer does not depend on this source
				}
				text := fmt.Sprint(status.Message(), status.Proto().GetDetails())
				require.NotRegexp(t, words, text, id)
				require.Contains(t, closed, status.Message(), "%s: docs/security.md lists every text", id)
				require.Equal(t, closed[status.Message()], status.Code(), id)
				seen[status.Message()], failed[method] = true, true
				if strings.Contains(status.Message(), "log") {
					cause, _, _ := strings.Cut(cause.Error(), `"`)
					logged[id] = cause[:min(len(cause), 20)]
				}
			}
		}
	}
	require.ElementsMatch(t, slices.Collect(maps.Keys(closed)), slices.Collect(maps.Keys(seen)), "docs/security.md lists no text that is not used")
	require.ElementsMatch(t, slices.Collect(maps.Keys(requests)), slices.Collect(maps.Keys(failed)), "every method was made fail")
	require.NotEmpty(t, logged)
	lines := strings.Split(f.log.String(), "\n")
	for id, cause := range logged {
		require.True(t, slices.ContainsFunc(lines, func(line string) bool { return strings.Contains(line, id) && strings.Contains(line, cause) }),
			"the log has the cause of %s", id)
	}
}

// How much other identities have open is theirs to know. The agent's log has it.
func TestWhatOthersHaveOpenStaysInTheAgent(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) {
		o.AllCallsAtOnce, o.AllWatchesAtOnce, o.RequestTimeout = 40, 40, time.Hour
	}))
	for method, what := range map[string]string{
		agentv1alpha1.StatusService_GetStatus_FullMethodName: "open calls", grpc_health_v1.Health_Watch_FullMethodName: "open streams",
	} {
		t.Run(what, func(t *testing.T) {
			var message string
			for n := range 4 {
				_, uri := tenant(n)
				p := f.rawPeerOf(uri)
				p.T = t
				for range 40 {
					p.announce(method, 1) // and never send it
				}
				var status string
				status, message = p.ending()
				require.Equal(t, "8", status, "RESOURCE_EXHAUSTED: of some, when others have some")
			}
			require.Regexp(t, "^all identities together have too many "+what+"; this identity has 8$", message)
			require.Regexp(t, `"sums"="[0-9]+ of 40"`, f.log.String())
		})
	}
}

// row is a row of the table in docs/security.md: a text, in code, and its gRPC code.
var row = regexp.MustCompile("(?m)^\\| `([^`]+)` \\| ([A-Z_]+) \\|")

// closedSet returns the texts of docs/security.md with their codes.
func closedSet(t *testing.T) map[string]codes.Code {
	t.Helper()
	_ = os.Getenv("TESTED_REFERENCE") // declares the page as an input of the test cache
	page, err := os.ReadFile("../../../docs/security.md")
	require.NoError(t, err)
	texts := map[string]codes.Code{}
	for _, match := range row.FindAllStringSubmatch(string(page), -1) {
		var code codes.Code
		require.NoError(t, code.UnmarshalJSON([]byte(`"`+match[2]+`"`)))
		texts[match[1]] = code
	}
	require.NotEmpty(t, texts)
	return texts
}

// rawConn is a connection without the client's interceptors.
func rawConn(t *testing.T, f *fixture, uri string) *grpc.ClientConn {
	t.Helper()
	files := f.authority.Issue(t, t.TempDir(), f.authority, uri)
	pair, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
	require.NoError(t, err)
	conn, err := grpc.NewClient("passthrough:///"+f.address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: f.authority.Pool(),
	})))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return conn
}

// invoke calls a method, and of a stream receives the first message.
func invoke(ctx context.Context, conn *grpc.ClientConn, method string, request, response proto.Message) error {
	if !strings.Contains(method, "/Watch") {
		return conn.Invoke(ctx, method, request, response)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(request); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return stream.RecvMsg(response)
}
