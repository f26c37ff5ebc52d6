package fakeagent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/test/bufconn"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/validation"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// connectionBuffer is how many bytes an in-memory connection can hold.
const connectionBuffer = 1 << 20

// DefaultCluster is the Cluster of node groups that do not name one. It exists unless
// [WithClusters] names others.
func DefaultCluster() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: "default", Name: "workload"}
}

// Agent is a fake agent. Its methods are safe for concurrent use.
type Agent struct {
	settings settings
	id       string
	rules    map[string]Rule
	script   *script
	server   *grpc.Server
	health   *health.Server
	serving  sync.WaitGroup

	mu          sync.Mutex
	closed      bool
	local       *bufconn.Listener
	localClient *client.Client
	closers     []func() error

	clusters map[clusterKey]*cluster
	paused   map[clusterKey]struct{}
	groups   map[string]*group
	claims   map[clusterKey]map[string]*claim
	// onboardings are the onboarding IDs of the Clusters that certificates are issued for.
	// authority is created for the first certificate, unless it was given. issued counts the
	// certificates.
	onboardings map[clusterKey]string
	authority   *Authority
	reports     map[clusterKey][]*agentv1alpha1.NodeReport
	sequence    int64 // of claims, in order of creation
	names       int64 // number of machine names used
	// expired counts how often the Cluster's tokens were made too old.
	expired  map[clusterKey]int64
	unsynced bool
	steps    Infrastructure
	changed  unpublished

	groupView   *view[*agentv1alpha1.NodeGroup]
	claimView   *view[*agentv1alpha1.Claim]
	machineView *view[*agentv1alpha1.Machine]
	// clusterView has every Cluster under the empty key: its streams are of all of them.
	clusterView   *view[*agentv1alpha1.Cluster]
	publishedView *view[*agentv1alpha1.PublishedObject]
	// nodePools are the last reports.
	nodePools map[clusterKey]*agentv1alpha1.ReportNodePoolsRequest
	// nodePoolSets are the NodePoolSets of each Cluster, the oldest first.
	nodePoolSets map[clusterKey][]*publishedSet
	dropped      chan struct{}
	frozen       chan struct{} // nil unless streams are frozen
}

// New starts an agent. The caller must close it.
func New(options ...Option) *Agent {
	s := defaults()
	for _, option := range options {
		option(&s)
	}
	a := &Agent{
		settings:      s,
		id:            uuid.NewString(),
		rules:         Rules(),
		authority:     s.authority,
		expired:       map[clusterKey]int64{},
		script:        &script{clock: s.clock, methods: map[string]*methodScript{}},
		health:        health.NewServer(),
		clusters:      map[clusterKey]*cluster{},
		paused:        map[clusterKey]struct{}{},
		groups:        map[string]*group{},
		claims:        map[clusterKey]map[string]*claim{},
		onboardings:   map[clusterKey]string{},
		reports:       map[clusterKey][]*agentv1alpha1.NodeReport{},
		steps:         s.infrastructure,
		changed:       newUnpublished(),
		groupView:     newView[*agentv1alpha1.NodeGroup](),
		claimView:     newView[*agentv1alpha1.Claim](),
		machineView:   newView[*agentv1alpha1.Machine](),
		clusterView:   newView[*agentv1alpha1.Cluster](),
		publishedView: newView[*agentv1alpha1.PublishedObject](),
		nodePools:     map[clusterKey]*agentv1alpha1.ReportNodePoolsRequest{},
		nodePoolSets:  map[clusterKey][]*publishedSet{},
		dropped:       make(chan struct{}),
	}
	validator, err := validation.New()
	if err != nil {
		panic(err) // the constraints compile, or the real agent would not start either
	}
	a.server = grpc.NewServer(
		grpc.Creds(identityCredentials{}),
		grpc.ChainUnaryInterceptor(a.script.unary(), a.admitUnary, validator.Unary(), a.authorizeUnary),
		grpc.ChainStreamInterceptor(a.script.stream(), a.admitStream, validator.Stream(), a.authorizeStream),
	)
	agentv1alpha1.RegisterNodeGroupServiceServer(a.server, nodeGroupService{agent: a})
	agentv1alpha1.RegisterClaimServiceServer(a.server, claimService{agent: a})
	agentv1alpha1.RegisterMachineServiceServer(a.server, machineService{agent: a})
	agentv1alpha1.RegisterClusterServiceServer(a.server, clusterService{agent: a})
	agentv1alpha1.RegisterNodePoolServiceServer(a.server, nodePoolService{agent: a})
	agentv1alpha1.RegisterStatusServiceServer(a.server, statusService{agent: a})
	agentv1alpha1.RegisterCertificateServiceServer(a.server, certificateService{agent: a})
	grpc_health_v1.RegisterHealthServer(a.server, a.health)
	reflection.Register(a.server)

	a.edit(func() {
		for _, ref := range s.clusters {
			a.ensureCluster(keyOf(ref))
		}
	})
	a.local = a.listen(localIdentity())
	a.localClient = a.connect(a.local)
	return a
}

// listen accepts in-memory connections, which all have the given identity.
func (a *Agent) listen(i identity) *bufconn.Listener {
	listener := bufconn.Listen(connectionBuffer)
	a.Serve(identifiedListener{Listener: listener, identity: i})
	return listener
}

// connect returns a client that uses the listener. The agent closes it. It does not retry calls, so
// that the script applies to each call once.
func (a *Agent) connect(listener *bufconn.Listener) *client.Client {
	conn, err := grpc.NewClient("passthrough:///fakeagent",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(client.MaxReceiveBytes)),
	)
	if err != nil {
		panic(err) // the target and the options are constant
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closers = append(a.closers, conn.Close)
	return client.FromConn(conn, client.Options{
		Clock:             a.settings.clock,
		HeartbeatInterval: a.settings.heartbeat,
		Logger:            a.settings.logger,
	})
}

// Client returns a client that may act for every Cluster. The agent closes it.
func (a *Agent) Client() *client.Client { return a.localClient }

// ClientFor returns a new client with the identity of the Cluster, which need not exist. The agent
// closes it.
func (a *Agent) ClientFor(cluster *agentv1alpha1.ClusterRef) *client.Client {
	return a.ClientAs(clusterIdentity(a.settings.trustDomain, keyOf(cluster)))
}

// ClientAs returns a new client with the identity. It is closed with the agent.
func (a *Agent) ClientAs(i Identity) *client.Client {
	return a.connect(a.listen(identity{name: i.ID, grants: slices.Clone(i.Grants)}))
}

// AutoscalerFor returns a new client with the identity of an autoscaler of the Cluster. The agent
// closes it.
func (a *Agent) AutoscalerFor(cluster *agentv1alpha1.ClusterRef) *client.Client {
	key := keyOf(cluster)
	return a.ClientAs(Identity{
		ID:     fmt.Sprintf("spiffe://%s/cluster-autoscaler/%s", a.settings.trustDomain, key),
		Grants: []Grant{{Role: RoleAutoscaler, Clusters: []string{key.String()}}},
	})
}

// Dial returns a raw connection that may act for every Cluster, for gRPC's WithContextDialer.
func (a *Agent) Dial(ctx context.Context) (net.Conn, error) { return a.local.DialContext(ctx) }

// Serve also serves on the listener, in plaintext. Its callers may act for every Cluster. It
// returns at once. The listener is closed with the agent.
func (a *Agent) Serve(listener net.Listener) {
	a.serving.Go(func() {
		if err := a.server.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			a.settings.logger.Error(err, "serving")
		}
	})
}

// ServeTLS also serves on the listener, with TLS 1.3. It accepts client certificates signed by the
// configuration's ClientCAs. The identity of a connection is the SPIFFE ID of the certificate,
// which must be of the agent's trust domain. A Cluster's own ID has the role cluster for it. grants
// returns any further grants of an ID. It is called at each handshake, possibly concurrently.
// ServeTLS returns at once. Closing the agent closes the listener.
func (a *Agent) ServeTLS(listener net.Listener, config *tls.Config, grants func(id string) []Grant) {
	a.Serve(newCertifiedListener(listener, config, a.settings.trustDomain, grants))
}

// Close ends every call, stream and client of the agent, and waits for them.
func (a *Agent) Close() {
	a.mu.Lock()
	a.closed = true
	closers := a.closers
	a.closers = nil
	a.mu.Unlock()
	for _, f := range closers {
		_ = f() // the connection may be closed already
	}
	a.server.Stop()
	a.serving.Wait()
}

// SetSynced sets whether the agent's view of the hub is complete. While it is not, every call of
// the agent's API except GetStatus fails with UNAVAILABLE. Open streams are not affected.
func (a *Agent) SetSynced(synced bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unsynced = !synced
	status := grpc_health_v1.HealthCheckResponse_SERVING
	if a.unsynced {
		status = grpc_health_v1.HealthCheckResponse_NOT_SERVING
	}
	a.health.SetServingStatus("", status)
}

// AddCluster adds a Cluster. The Cluster of a node group is added automatically.
func (a *Agent) AddCluster(cluster *agentv1alpha1.ClusterRef) {
	a.edit(func() { a.ensureCluster(keyOf(cluster)) })
}

// RemoveCluster removes a Cluster with its node groups, machines and claims.
func (a *Agent) RemoveCluster(cluster *agentv1alpha1.ClusterRef) {
	a.edit(func() {
		key := keyOf(cluster)
		for id, g := range a.groups {
			if g.cluster != key {
				continue
			}
			delete(a.groups, id)
			for _, m := range slices.Clone(g.machines) {
				a.remove(m)
			}
			a.touch(g)
		}
		for _, c := range a.claims[key] {
			a.touchClaim(c)
		}
		delete(a.claims, key)
		delete(a.clusters, key)
		delete(a.paused, key)
		delete(a.onboardings, key)
		delete(a.reports, key)
		delete(a.nodePools, key)
		delete(a.nodePoolSets, key)
		a.republish(key)
		a.touchCluster(key)
	})
}

// SetPaused pauses or unpauses a Cluster, as is done to move it to another hub. While it is paused,
// nothing is concluded from missing objects, its node groups take no claims, and releases are
// rejected.
func (a *Agent) SetPaused(cluster *agentv1alpha1.ClusterRef, paused bool) {
	a.edit(func() {
		if paused {
			a.paused[keyOf(cluster)] = struct{}{}
		} else {
			delete(a.paused, keyOf(cluster))
		}
		a.touchCluster(keyOf(cluster))
		for _, g := range a.groups {
			if g.cluster == keyOf(cluster) {
				a.touch(g)
			}
		}
	})
}

// whole returns nil if a missing object of the Cluster is certainly gone. a.mu must be held.
func (a *Agent) whole(cluster clusterKey) error {
	if _, ok := a.clusters[cluster]; !ok {
		return agenterrors.ClusterNotFound(cluster.ref())
	}
	if _, paused := a.paused[cluster]; paused {
		return agenterrors.ClusterPaused("the Cluster is paused")
	}
	return nil
}

// readable returns nil if the view is complete. Whether the caller may call the method for the
// Cluster has been checked before. a.mu must be held.
func (a *Agent) readable(context.Context, clusterKey) error {
	if a.unsynced {
		return agenterrors.NotSynced("the agent's view of the hub is not complete yet")
	}
	return nil
}

// existing is like [Agent.readable], for calls that need an existing Cluster. Only callers that may
// act for every Cluster learn that it does not exist.
func (a *Agent) existing(ctx context.Context, cluster clusterKey) error {
	if err := a.readable(ctx, cluster); err != nil {
		return err
	}
	if _, ok := a.clusters[cluster]; ok {
		return nil
	}
	if caller, err := callerOf(ctx); err != nil || !caller.seesAll() {
		return errNotYours()
	}
	return agenterrors.ClusterNotFound(cluster.ref())
}

// actable is like [Agent.readable], for calls that act on claims of the holder.
func (a *Agent) actable(ctx context.Context, cluster clusterKey, holder string) error {
	if err := a.readable(ctx, cluster); err != nil {
		return err
	}
	caller, err := callerOf(ctx)
	if err == nil && !caller.mayActAs(cluster, holder) {
		return errNotYourHolder(holder)
	}
	return err
}

// edit applies f to the state and publishes the result.
func (a *Agent) edit(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	a.publish()
}

// after applies f to the state after the delay, or never if the delay is [Manual]. a.mu must be
// held. Without a delay, f runs before after returns.
func (a *Agent) after(delay time.Duration, f func()) {
	switch {
	case delay < 0:
	case delay == 0:
		f()
	default:
		// This needs its own goroutine: a fake clock holds its lock during the call, and f reads
		// the time.
		a.settings.clock.AfterFunc(delay, func() {
			go func() {
				a.mu.Lock()
				defer a.mu.Unlock()
				if a.closed {
					return
				}
				f()
				a.publish()
			}()
		})
	}
}

func (a *Agent) now() time.Time { return a.settings.clock.Now() }
