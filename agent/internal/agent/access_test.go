package agent_test

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/credentials/local"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var writeMatrix = flag.Bool("write-matrix", false, "rewrite docs/access.md")

// caller is a kind of identity, with its intended rights. They are specified here independently of
// [authz.Methods], which the agent uses.
type caller struct {
	name string
	conn *grpc.ClientConn
	// connects reports whether the handshake succeeds, and identified whether the caller has an
	// identity then.
	connects, identified bool
	// reads reports whether it may read data of the Cluster. acts are the holders as which it may
	// create, release and collect claims.
	reads bool
	acts  []string
	// readsOther reports whether it may read data of another Cluster, but not of this one.
	readsOther bool
	// scales reports whether it may call as the cluster-autoscaler does, without naming a Cluster.
	scales bool
	// certified reports whether it may get a certificate of the Cluster, and outdated whether its
	// own certificate belongs to a past onboarding of the Cluster.
	certified, outdated bool
	// shutOut reports whether its certificate is denied, or is not of the present onboarding of the
	// Cluster that it names. Such a caller may not even call what every other one may.
	shutOut bool
}

// readsSome reports whether it may read data of any Cluster.
func (c caller) readsSome() bool { return c.reads || c.readsOther }

// isShim reports whether it is the Cluster's own shim: no other caller acts as that holder alone.
func (c caller) isShim() bool { return slices.Equal(c.acts, []string{"karpenter"}) }

// rpc is a method, with a request for the Cluster.
type rpc struct {
	method  protoreflect.MethodDescriptor
	request string // JSON
	// holder is the holder of the claims that it concerns, or empty.
	holder string
	// onClaim means that the claim must already exist.
	onClaim bool
	row
}

// row is what the test must know about a method.
type row struct {
	json string
	// also is a code that, like OK, means that the caller was admitted: the requested object does
	// not exist, or the operation is not possible.
	also codes.Code
	// open reports whether every caller may call it, and connected whether every identity may.
	open, connected bool
	// asksOnboarding reports whether it answers callers whose onboarding has ended.
	asksOnboarding bool
	// certifies reports whether only the Cluster's own callers may call it.
	certifies bool
	// reports means that only the Cluster's shim may call it.
	reports bool
	// fleet reports whether every caller with a role for any Cluster may call it, and gets an
	// answer about those Clusters alone.
	fleet bool
	// scales reports whether only the autoscaler of a single Cluster may call it.
	scales bool
}

func (c rpc) name() string {
	name := fmt.Sprintf("%s/%s", strings.TrimPrefix(string(c.method.Parent().FullName()), "capi.agent.v1alpha1."), c.method.Name())
	name = strings.TrimPrefix(name, "clusterautoscaler.cloudprovider.v1.")
	if c.holder != "" {
		name += ", holder " + c.holder
	}
	return name
}

const (
	noConnection = "no connection"
	admitted     = "yes"
)

// wanted returns the expected result of a call.
func wanted(by caller, of rpc) string {
	switch {
	case !by.connects:
		return noConnection
	case by.shutOut && (of.open || of.connected && !of.asksOnboarding):
		return codes.Unauthenticated.String()
	case of.open:
		return admitted
	case !by.identified:
		return codes.Unauthenticated.String()
	case of.connected:
		return admitted
	case of.fleet && by.outdated && by.reads:
		return codes.Unauthenticated.String()
	case of.fleet && by.readsSome():
		return admitted
	case of.fleet:
		return codes.PermissionDenied.String()
	case of.scales && by.scales:
		return admitted
	case of.scales:
		return codes.PermissionDenied.String()
	case by.outdated && (by.reads || of.certifies):
		return codes.Unauthenticated.String()
	case of.certifies && by.certified:
		return admitted
	case of.certifies:
		return codes.PermissionDenied.String()
	case of.reports && by.isShim():
		return admitted
	case of.reports:
		return codes.PermissionDenied.String()
	case of.holder == "" && by.reads, slices.Contains(by.acts, of.holder):
		return admitted
	}
	return codes.PermissionDenied.String()
}

// holders are the holder of the Cluster's shim, that of an autoscaler, and one that only an
// administrator may act as.
var holders = []string{"karpenter", "cluster-autoscaler", "another-tool"}

// requests has the request of every method in JSON, by name. $CLUSTER is the Cluster, $GROUP its
// node group, $HELD the one of the cluster-autoscaler, $ID the ID of a claim, $HOLDER its holder,
// and $TOKEN the token of that holder's listing.
var requests = map[protoreflect.FullName]row{
	"capi.agent.v1alpha1.NodeGroupService.ListNodeGroups":  {json: `{"cluster": $CLUSTER}`},
	"capi.agent.v1alpha1.NodeGroupService.GetNodeGroup":    {json: `{"cluster": $CLUSTER, "id": "$GROUP"}`},
	"capi.agent.v1alpha1.NodeGroupService.WatchNodeGroups": {json: `{"cluster": $CLUSTER}`},

	"capi.agent.v1alpha1.ClaimService.CreateClaim":   {json: `{"cluster": $CLUSTER, "claimId": "$ID", "holder": "$HOLDER", "candidates": ["$GROUP"]}`},
	"capi.agent.v1alpha1.ClaimService.ReleaseClaim":  {json: `{"cluster": $CLUSTER, "claimId": "$ID"}`},
	"capi.agent.v1alpha1.ClaimService.ReturnMachine": {json: `{"cluster": $CLUSTER, "claimId": "$ID"}`, also: codes.FailedPrecondition},
	"capi.agent.v1alpha1.ClaimService.SyncClaims":    {json: `{"cluster": $CLUSTER, "holder": "$HOLDER", "token": "$TOKEN"}`},
	"capi.agent.v1alpha1.ClaimService.GetClaim":      {json: `{"cluster": $CLUSTER, "claimId": "$ID"}`, also: codes.NotFound},
	"capi.agent.v1alpha1.ClaimService.ListClaims":    {json: `{"cluster": $CLUSTER}`},
	"capi.agent.v1alpha1.ClaimService.WatchClaims":   {json: `{"cluster": $CLUSTER}`},

	"capi.agent.v1alpha1.MachineService.GetMachine":    {json: `{"cluster": $CLUSTER, "name": "$ID"}`, also: codes.NotFound},
	"capi.agent.v1alpha1.MachineService.ListMachines":  {json: `{"cluster": $CLUSTER}`},
	"capi.agent.v1alpha1.MachineService.WatchMachines": {json: `{"cluster": $CLUSTER}`},

	"capi.agent.v1alpha1.ClusterService.ListClusters":  {json: `{}`, fleet: true},
	"capi.agent.v1alpha1.ClusterService.WatchClusters": {json: `{}`, fleet: true},

	"capi.agent.v1alpha1.NodePoolService.ListPublishedObjects":  {json: `{"cluster": $CLUSTER}`},
	"capi.agent.v1alpha1.NodePoolService.WatchPublishedObjects": {json: `{"cluster": $CLUSTER}`},
	"capi.agent.v1alpha1.NodePoolService.ReportNodePools":       {json: `{"cluster": $CLUSTER}`, reports: true},

	"capi.agent.v1alpha1.CertificateService.IssueCertificate": {
		// A shim on a unix socket is admitted, but has no certificate that could be renewed.
		json: `{"cluster": $CLUSTER, "signingRequest": "$CSR"}`, also: codes.FailedPrecondition, certifies: true,
	},

	"capi.agent.v1alpha1.StatusService.GetStatus": {json: `{}`, connected: true, asksOnboarding: true},

	scaling + "NodeGroups":           {json: `{}`, scales: true},
	scaling + "NodeGroupForNode":     {json: `{"node": {"providerID": "test://a", "name": "a"}}`, scales: true},
	scaling + "PricingNodePrice":     {json: `{"node": {"name": "template-node-for-$HELD-1"}}`, scales: true},
	scaling + "PricingPodPrice":      {json: `{}`, scales: true},
	scaling + "GPULabel":             {json: `{}`, scales: true},
	scaling + "GetAvailableGPUTypes": {json: `{}`, scales: true},
	scaling + "Cleanup":              {json: `{}`, scales: true},
	scaling + "Refresh":              {json: `{}`, scales: true},

	scaling + "NodeGroupTargetSize":         {json: `{"id": "$HELD"}`, scales: true},
	scaling + "NodeGroupIncreaseSize":       {json: `{"id": "$HELD", "delta": 1}`, scales: true},
	scaling + "NodeGroupDeleteNodes":        {json: `{"id": "$HELD", "nodes": [{"name": "a"}]}`, scales: true, also: codes.FailedPrecondition},
	scaling + "NodeGroupDecreaseTargetSize": {json: `{"id": "$HELD", "delta": -1}`, scales: true},
	scaling + "NodeGroupNodes":              {json: `{"id": "$HELD"}`, scales: true},
	scaling + "NodeGroupTemplateNodeInfo":   {json: `{"id": "$HELD"}`, scales: true},
	scaling + "NodeGroupGetOptions":         {json: `{"id": "$HELD"}`, scales: true},

	"grpc.health.v1.Health.Check": {json: `{}`, open: true},
	"grpc.health.v1.Health.List":  {json: `{}`, open: true},
	"grpc.health.v1.Health.Watch": {json: `{}`, open: true},

	"grpc.reflection.v1.ServerReflection.ServerReflectionInfo":      {json: `{"listServices": ""}`, connected: true},
	"grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo": {json: `{"listServices": ""}`, connected: true},
}

// scaling is the service of the cluster-autoscaler.
const scaling = "clusterautoscaler.cloudprovider.v1.externalgrpc.CloudProvider."

// present is the current onboarding of the Cluster.
const present = "0123456789abcdef"

// TestAccessMatrix makes every kind of caller call every method that the agent serves according to
// its reflection. If a call changes a claim, it is made for a claim of each kind of holder. The
// test fails if a method has no row in [requests], or if the documentation shows a different
// matrix.
func TestAccessMatrix(t *testing.T) {
	namespace := plane.Namespace(t)
	onboarded := capitest.NewCluster(namespace, "spoke")
	onboarded.Labels = map[string]string{v1alpha1.OnboardingLabel: present}
	plane.Create(t, onboarded, capitest.NewCluster(namespace, "other"),
		&v1alpha1.Spoke{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "spoke", Labels: onboarded.Labels}},
		capitest.NewInfrastructureTemplate(namespace, "workers", nil),
		capitest.NewMachineDeployment(namespace, "workers", "spoke", 0, capitest.Sized("0", "1000"),
			capitest.Annotated(capacity.MemoryAnnotation, "16Gi"), capitest.Annotated(capacity.CPUAnnotation, "4")),
		capitest.NewMachineDeployment(namespace, "held", "spoke", 0, capitest.Sized("0", "1000"),
			capitest.Annotated(capacity.MemoryAnnotation, "16Gi"), capitest.Annotated(capacity.CPUAnnotation, "4"),
			capitest.Annotated(v1alpha1.HolderAnnotation, v1alpha1.ClusterAutoscaler)))
	callers := serveEveryWay(t, namespace)
	admin := callers[len(callers)-1].conn
	eventually(t, "the node group takes claims", func(ctx context.Context) (bool, error) {
		response, err := agentv1alpha1.NewNodeGroupServiceClient(admin).GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"}, Id: namespace + "/workers",
		})
		return err == nil && response.GetNodeGroup().GetAvailability().GetAvailable(), nil
	})

	calls := served(t, admin, namespace)
	results := make([][]string, len(callers))
	for i, by := range callers {
		for j, of := range calls {
			id := fmt.Sprintf("claim-%d-%d", i, j)
			if of.onClaim {
				_, err := agentv1alpha1.NewClaimServiceClient(admin).CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
					Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"}, ClaimId: id, Holder: of.holder,
					Candidates: []string{namespace + "/workers"},
				})
				require.NoError(t, err)
			}
			results[i] = append(results[i], of.attempt(t, by.conn, id))
			assert.Equal(t, wanted(by, of), results[i][j], "%s by %s", of.name(), by.name)
		}
	}
	text := matrix(callers, calls, results)
	t.Log("\n" + text)
	if *writeMatrix {
		require.NoError(t, os.WriteFile(accessPage, []byte(text), 0o600))
	}
	page, err := os.ReadFile(accessPage)
	require.NoError(t, err)
	require.Equal(t, text, string(page), "docs/access.md is not current: run make access-matrix")
}

var accessPage = filepath.Join("..", "..", "..", "docs", "access.md")

// serveEveryWay runs an agent with every kind of listener, and returns its callers. The last one is
// an administrator.
func serveEveryWay(t *testing.T, namespace string) []caller {
	t.Helper()
	policy, err := authz.ParsePolicy(fmt.Appendf(nil, `
identities:
- {id: spiffe://karpenter-capi/reader, roles: [reader], clusters: ["%[1]s/spoke"]}
- {id: spiffe://karpenter-capi/reader-of-other, roles: [reader], clusters: ["%[1]s/other"]}
- {id: spiffe://karpenter-capi/autoscaler, roles: [autoscaler], clusters: ["%[1]s/spoke"]}
- {id: spiffe://karpenter-capi/autoscaler-of-both, roles: [autoscaler], clusters: ["%[1]s/spoke", "%[1]s/other"]}
- {id: spiffe://karpenter-capi/admin, roles: [admin], allClusters: true}
- {id: spiffe://karpenter-capi/denied, roles: [admin], allClusters: true}
clusters: ["%[1]s/spoke", "%[1]s/other"]
deny:
- id: spiffe://karpenter-capi/denied
`, namespace), "karpenter-capi")
	require.NoError(t, err)
	o := testOptions(namespace)
	o.Limits.CallsPerSecond, o.Limits.CallBurst = 10000, 10000
	authority := testpki.New(t)
	own := authority.Issue(t, t.TempDir(), authority)
	o.ClientCAFile, o.TLSCertFile = own.CAFile, own.CertFile
	o.IssuerCertFile, o.IssuerKeyFile = authority.Write(t, t.TempDir())
	a, err := agent.New(t.Context(), agent.Config{Options: o, Hub: hub, Policy: func() *authz.Policy { return policy }})
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(context.Background())
	secure, release, err := server.ListenTLS(ctx, "127.0.0.1:0", server.TLSFiles{CertFile: own.CertFile, KeyFile: own.KeyFile, ClientCAFile: own.CAFile})
	require.NoError(t, err)
	loopback, err := server.ListenLoopback(ctx, "127.0.0.1:0")
	require.NoError(t, err)
	listeners := []server.Listener{secure, loopback}
	sockets := t.TempDir()
	for role, clusters := range map[authz.Role][]string{
		authz.RoleCluster: {namespace + "/spoke"}, authz.RoleReader: {namespace + "/other", "elsewhere/*"}, authz.RoleAdmin: nil,
	} {
		grant, err := authz.ParseGrant(string(role), clusters)
		require.NoError(t, err)
		socket, err := server.ListenUnix(ctx, filepath.Join(sockets, string(role)), grant)
		require.NoError(t, err)
		listeners = append(listeners, socket)
	}
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx, listeners...) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-ended)
		release()
	})
	eventually(t, "the agent's view is complete", func(context.Context) (bool, error) { return a.Synced(), nil })

	connect := func(address string, with credentials.TransportCredentials) *grpc.ClientConn {
		conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(with))
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	overTLS := func(certificates ...tls.Certificate) *grpc.ClientConn {
		return connect(secure.Addr().String(), credentials.NewTLS(&tls.Config{
			RootCAs: authority.Pool(), Certificates: certificates, MinVersion: tls.VersionTLS13,
		}))
	}
	with := func(by *testpki.Authority, life time.Duration, uris ...string) *grpc.ClientConn {
		files := by.IssueFor(t, life, t.TempDir(), authority, uris...)
		certificate, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
		require.NoError(t, err)
		return overTLS(certificate)
	}
	as := func(uris ...string) *grpc.ClientConn { return with(authority, time.Hour, uris...) }
	onSocket := func(role authz.Role) *grpc.ClientConn {
		return connect("unix://"+filepath.Join(sockets, string(role)), local.NewCredentials())
	}
	bare := "spiffe://karpenter-capi/cluster/" + namespace + "/spoke"
	spoke := bare + "/" + present
	bootstrap := "spiffe://karpenter-capi/bootstrap/" + namespace + "/spoke/"
	return []caller{
		{name: "without TLS", conn: connect(secure.Addr().String(), insecure.NewCredentials())},
		{name: "no certificate", conn: overTLS()},
		{name: "expired certificate", conn: with(authority, -time.Second, spoke)},
		{name: "another authority", conn: with(testpki.New(t), time.Hour, spoke)},
		{name: "no URI", conn: as(), connects: true},
		{name: "two URIs", conn: as(spoke, "spiffe://karpenter-capi/admin"), connects: true},
		{name: "no SPIFFE id", conn: as("https://karpenter-capi/cluster/" + namespace + "/spoke/" + present), connects: true},
		{name: "another trust domain", conn: as("spiffe://elsewhere/cluster/" + namespace + "/spoke/" + present), connects: true},
		{name: "denied by the policy", conn: as("spiffe://karpenter-capi/denied"), connects: true, shutOut: true},
		{name: "no role", conn: as("spiffe://karpenter-capi/nobody"), connects: true, identified: true},
		{name: "a Cluster that is not listed", conn: as("spiffe://karpenter-capi/cluster/" + namespace + "/unlisted"), connects: true, identified: true},
		{name: "another Cluster", conn: as("spiffe://karpenter-capi/cluster/" + namespace + "/other"), connects: true, identified: true, readsOther: true},
		{name: "reader, of another Cluster", conn: as("spiffe://karpenter-capi/reader-of-other"), connects: true, identified: true, readsOther: true},
		{name: "reader", conn: as("spiffe://karpenter-capi/reader"), connects: true, identified: true, reads: true},
		{
			name: "autoscaler", conn: as("spiffe://karpenter-capi/autoscaler"), connects: true, identified: true, reads: true,
			acts: []string{"cluster-autoscaler"}, scales: true,
		},
		{
			name: "autoscaler, of several Clusters", conn: as("spiffe://karpenter-capi/autoscaler-of-both"), connects: true, identified: true, reads: true,
			acts: []string{"cluster-autoscaler"},
		},
		{
			name: "the Cluster itself", conn: as(spoke), connects: true, identified: true, reads: true, acts: []string{"karpenter"},
			certified: true,
		},
		{
			name: "the Cluster itself, of an earlier onboarding", conn: as(bare + "/fedcba9876543210"), connects: true, identified: true, reads: true,
			certified: true, outdated: true, shutOut: true,
		},
		{
			name: "the Cluster itself, without an onboarding", conn: as(bare), connects: true, identified: true, reads: true, certified: true, outdated: true,
			shutOut: true,
		},
		{name: "the Cluster's bootstrap", conn: as(bootstrap + present), connects: true, identified: true, certified: true},
		{
			name: "the Cluster's bootstrap, of an earlier onboarding", conn: as(bootstrap + "fedcba9876543210"), connects: true, identified: true,
			certified: true, outdated: true, shutOut: true,
		},
		{
			name: "the bootstrap of another Cluster", conn: as("spiffe://karpenter-capi/bootstrap/" + namespace + "/other/" + present),
			connects: true, identified: true, shutOut: true,
		},
		{
			name: "unix socket of the Cluster", conn: onSocket(authz.RoleCluster), connects: true, identified: true, reads: true,
			acts: []string{"karpenter"}, certified: true,
		},
		{name: "unix socket of readers of other Clusters", conn: onSocket(authz.RoleReader), connects: true, identified: true, readsOther: true},
		{name: "unix socket", conn: onSocket(authz.RoleAdmin), connects: true, identified: true, reads: true, acts: holders},
		{
			name: "loopback, without TLS", conn: connect(loopback.Addr().String(), local.NewCredentials()), connects: true, identified: true, reads: true,
			acts: holders,
		},
		{name: "admin", conn: as("spiffe://karpenter-capi/admin"), connects: true, identified: true, reads: true, acts: holders},
	}
}

// served returns the methods to call.
func served(tb testing.TB, admin grpc.ClientConnInterface, namespace string) []rpc {
	tb.Helper()
	stream, err := grpc_reflection_v1.NewServerReflectionClient(admin).ServerReflectionInfo(tb.Context())
	require.NoError(tb, err)
	require.NoError(tb, stream.Send(&grpc_reflection_v1.ServerReflectionRequest{
		MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{},
	}))
	response, err := stream.Recv()
	require.NoError(tb, err)
	require.NoError(tb, stream.CloseSend())
	var calls []rpc
	known := 0
	for _, service := range response.GetListServicesResponse().GetService() {
		descriptor, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service.GetName()))
		require.NoError(tb, err)
		methods := descriptor.(protoreflect.ServiceDescriptor).Methods() //nolint:forcetypeassert // reflection says so
		for i := range methods.Len() {
			method := methods.Get(i)
			row, has := requests[method.FullName()]
			require.True(tb, has, "%s has no row in requests", method.FullName())
			known++
			text := strings.NewReplacer("$CLUSTER", fmt.Sprintf(`{"namespace": %q, "name": "spoke"}`, namespace), "$GROUP", namespace+"/workers",
				"$HELD", namespace+"/held").
				Replace(row.json)
			text = strings.ReplaceAll(text, "$CSR", base64.StdEncoding.EncodeToString(testpki.SigningRequest(tb)))
			of := rpc{method: method, request: text, row: row}
			if !slices.Contains([]string{"CreateClaim", "ReleaseClaim", "ReturnMachine", "SyncClaims"}, string(method.Name())) {
				calls = append(calls, of)
				continue
			}
			for _, of.holder = range holders {
				of.onClaim = !strings.Contains(row.json, "$HOLDER")
				list, err := agentv1alpha1.NewClaimServiceClient(admin).ListClaims(tb.Context(), &agentv1alpha1.ListClaimsRequest{
					Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"}, Holder: of.holder,
				})
				require.NoError(tb, err)
				of.request = strings.NewReplacer("$HOLDER", of.holder, "$TOKEN", list.GetToken()).Replace(text)
				calls = append(calls, of)
			}
		}
	}
	require.Equal(tb, len(requests), known, "requests has rows of methods that are not served")
	return calls
}

// attempt makes the call and returns its result: no connection, the code of a rejection, or
// admitted.
func (c rpc) attempt(t *testing.T, conn *grpc.ClientConn, id string) string {
	t.Helper()
	request, response := dynamicpb.NewMessage(c.method.Input()), dynamicpb.NewMessage(c.method.Output())
	require.NoError(t, protojson.Unmarshal([]byte(strings.ReplaceAll(c.request, "$ID", id)), request))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	// All kinds of methods are called as streams. The first message determines the result.
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		fmt.Sprintf("/%s/%s", c.method.Parent().FullName(), c.method.Name()))
	if err == nil {
		err = stream.SendMsg(request)
	}
	// For io.EOF, the stream's status has the reason.
	if err == nil || errors.Is(err, io.EOF) {
		_ = stream.CloseSend()
		err = stream.RecvMsg(response)
	}
	switch code := status.Code(err); code {
	case codes.OK, c.also:
		return admitted
	case codes.Unavailable:
		return noConnection
	case codes.Unauthenticated, codes.PermissionDenied:
		return code.String()
	default:
		t.Errorf("%s: %v", c.name(), err)
		return code.String()
	}
}

// matrix renders callers and calls as a table. Methods with the same results share a column, and
// callers with the same results share a row.
func matrix(callers []caller, calls []rpc, results [][]string) string {
	var text strings.Builder
	text.WriteString(`# Who may call what

The results of calling every method that the agent serves, for one Cluster, over the network, as
every kind of caller. ` + "`make access-matrix`" + ` repeats these calls and prints this page. [Access for
others](install.md#access-for-others) describes how certificates and the policy determine what a
caller may do.

`)
	shown := map[string]string{
		admitted: "yes", noConnection: "no connection", codes.Unauthenticated.String(): "`UNAUTHENTICATED`",
		codes.PermissionDenied.String(): "`PERMISSION_DENIED`",
	}
	columns := lo.GroupByMap(lo.Range(len(calls)), func(j int) (string, int) {
		return strings.Join(lo.Map(results, func(row []string, _ int) string { return row[j] }), "\n"), j
	})
	firsts := lo.Values(columns)
	slices.SortFunc(firsts, func(a, b []int) int { return a[0] - b[0] })
	text.WriteString("| caller |")
	for k := range firsts {
		fmt.Fprintf(&text, " %c |", 'A'+k)
	}
	text.WriteString("\n|---|" + strings.Repeat("---|", len(firsts)) + "\n")
	for i, by := range callers {
		fmt.Fprintf(&text, "| %s |", by.name)
		for _, alike := range firsts {
			fmt.Fprintf(&text, " %s |", shown[results[i][alike[0]]])
		}
		text.WriteString("\n")
	}
	text.WriteString("\n| | methods |\n|---|---|\n")
	for k, alike := range firsts {
		names := lo.Map(alike, func(j, _ int) string { return calls[j].name() })
		fmt.Fprintf(&text, "| %c | %s |\n", 'A'+k, strings.Join(names, "; "))
	}
	return text.String()
}
