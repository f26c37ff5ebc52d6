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

// connectionBuffer is how many bytes an in-memory connection holds.
const connectionBuffer = 1 << 20

// DefaultCluster is the Cluster of node groups that name none. It exists unless [WithClusters] names others.
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

	clusters map[clusterKey]struct{}
	paused   map[clusterKey]struct{}
	groups   map[string]*group
	claims   map[clusterKey]map[string]*claim
	// onboardings are the ids of the Clusters that certificates are issued for, by an authority that is made with the first unless it was given.
	onboardings map[clusterKey]string
	authority   *Authority
	reports     map[clusterKey][]*agentv1alpha1.NodeReport
	sequence    int64 // of claims, in the order of their making
	names       int64 // of machines
	generation  int64 // of the catalogue
	// expired counts how often the Cluster's tokens were made too old.
	expired  map[clusterKey]int64
	unsynced bool
	steps    Infrastructure
	changed  dirt

	groupFeed   *feed[*agentv1alpha1.NodeGroup]
	claimFeed   *feed[*agentv1alpha1.Claim]
	machineFeed *feed[*agentv1alpha1.Machine]
	dropped     chan struct{}
	frozen      chan struct{} // nil unless streams are frozen
}

// New starts an agent. Close it.
func New(options ...Option) *Agent {
	s := defaults()
	for _, option := range options {
		option(&s)
	}
	a := &Agent{
		settings:    s,
		id:          uuid.NewString(),
		rules:       Rules(),
		authority:   s.authority,
		expired:     map[clusterKey]int64{},
		script:      &script{clock: s.clock, methods: map[string]*methodScript{}},
		health:      health.NewServer(),
		clusters:    map[clusterKey]struct{}{},
		paused:      map[clusterKey]struct{}{},
		groups:      map[string]*group{},
		claims:      map[clusterKey]map[string]*claim{},
		onboardings: map[clusterKey]string{},
		reports:     map[clusterKey][]*agentv1alpha1.NodeReport{},
		steps:       s.infrastructure,
		changed:     newDirt(),
		groupFeed:   newFeed[*agentv1alpha1.NodeGroup](),
		claimFeed:   newFeed[*agentv1alpha1.Claim](),
		machineFeed: newFeed[*agentv1alpha1.Machine](),
		dropped:     make(chan struct{}),
	}
	for _, cluster := range s.clusters {
		a.clusters[keyOf(cluster)] = struct{}{}
	}
	validator, err := validation.New()
	if err != nil {
		panic(err) // The constraints compile, or no agent starts at all.
	}
	a.server = grpc.NewServer(
		grpc.Creds(identityCredentials{}),
		grpc.ChainUnaryInterceptor(a.script.unary(), a.admitUnary, validator.Unary(), a.authorizeUnary),
		grpc.ChainStreamInterceptor(a.script.stream(), a.admitStream, validator.Stream(), a.authorizeStream),
	)
	agentv1alpha1.RegisterNodeGroupServiceServer(a.server, nodeGroupService{agent: a})
	agentv1alpha1.RegisterClaimServiceServer(a.server, claimService{agent: a})
	agentv1alpha1.RegisterMachineServiceServer(a.server, machineService{agent: a})
	agentv1alpha1.RegisterStatusServiceServer(a.server, statusService{agent: a})
	agentv1alpha1.RegisterCertificateServiceServer(a.server, certificateService{agent: a})
	grpc_health_v1.RegisterHealthServer(a.server, a.health)
	reflection.Register(a.server)

	a.local = a.listen(localIdentity())
	a.localClient = a.connect(a.local)
	return a
}

// listen accepts in-memory connections that all have the identity.
func (a *Agent) listen(i identity) *bufconn.Listener {
	listener := bufconn.Listen(connectionBuffer)
	a.Serve(identifiedListener{Listener: listener, identity: i})
	return listener
}

// connect returns a client over the listener, closed with the agent. It does not repeat calls, so that each call meets the
// script once.
func (a *Agent) connect(listener *bufconn.Listener) *client.Client {
	conn, err := grpc.NewClient("passthrough:///fakeagent",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(client.MaxReceiveBytes)),
	)
	if err != nil {
		panic(err) // The target and the options are constant.
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

// Client returns a client that may act for every Cluster, closed with the agent.
func (a *Agent) Client() *client.Client { return a.localClient }

// ClientFor returns a new client with the identity of the Cluster, closed with the agent. The Cluster need not exist.
func (a *Agent) ClientFor(cluster *agentv1alpha1.ClusterRef) *client.Client {
	return a.ClientAs(clusterIdentity(a.settings.trustDomain, keyOf(cluster)))
}

// ClientAs returns a new client with the identity, closed with the agent.
func (a *Agent) ClientAs(i Identity) *client.Client {
	return a.connect(a.listen(identity{name: i.ID, grants: slices.Clone(i.Grants)}))
}

// AutoscalerFor returns a new client with the identity of an autoscaler of the Cluster, closed with the agent.
func (a *Agent) AutoscalerFor(cluster *agentv1alpha1.ClusterRef) *client.Client {
	key := keyOf(cluster)
	return a.ClientAs(Identity{
		ID:     fmt.Sprintf("spiffe://%s/cluster-autoscaler/%s", a.settings.trustDomain, key),
		Grants: []Grant{{Role: RoleAutoscaler, Clusters: []string{key.String()}}},
	})
}

// Dial returns a bare connection that may act for every Cluster, for gRPC's WithContextDialer.
func (a *Agent) Dial(ctx context.Context) (net.Conn, error) { return a.local.DialContext(ctx) }

// Serve also answers on the listener, in plaintext and for every Cluster, until the agent is closed, which closes the listener.
// It returns at once.
func (a *Agent) Serve(listener net.Listener) {
	a.serving.Go(func() {
		if err := a.server.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			a.settings.logger.Error(err, "serving")
		}
	})
}

// ServeTLS also answers on the listener, with TLS 1.3, to callers with a client certificate that the configuration's ClientCAs signed. Their identity
// is the SPIFFE id in it, of the agent's trust domain. A Cluster's own id has the role cluster for it; grants returns what else an id may do, at each
// handshake, and may be called concurrently. An agent that is closed closes the listener. It returns at once.
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
		_ = f() // A connection that is closed already is as good.
	}
	a.server.Stop()
	a.serving.Wait()
}

// SetSynced says whether the agent's view of the hub is complete. While it is not, every call but GetStatus answers
// UNAVAILABLE; open streams stay.
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

// AddCluster makes a Cluster exist. Node groups make theirs exist by themselves.
func (a *Agent) AddCluster(cluster *agentv1alpha1.ClusterRef) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.clusters[keyOf(cluster)] = struct{}{}
}

// RemoveCluster makes a Cluster not exist any more, nor its node groups, machines and claims.
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
	})
}

// SetPaused pauses a Cluster as somebody does who is about to move it to another hub: nothing is concluded from what is missing, and releases
// are not taken.
func (a *Agent) SetPaused(cluster *agentv1alpha1.ClusterRef, paused bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if paused {
		a.paused[keyOf(cluster)] = struct{}{}
	} else {
		delete(a.paused, keyOf(cluster))
	}
}

// whole returns nil when what is missing of the cluster can be taken for gone. It is called with the lock held.
func (a *Agent) whole(cluster clusterKey) error {
	if _, ok := a.clusters[cluster]; !ok {
		return agenterrors.ClusterNotFound(cluster.ref())
	}
	if _, paused := a.paused[cluster]; paused {
		return agenterrors.ClusterPaused("the Cluster is paused")
	}
	return nil
}

// readable returns nil when the view is complete. That the caller may call for the cluster was found before. It is called with the lock held.
func (a *Agent) readable(context.Context, clusterKey) error {
	if a.unsynced {
		return agenterrors.NotSynced("the agent's view of the hub is not complete yet")
	}
	return nil
}

// existing is [Agent.readable] for calls about node groups, which only a Cluster that exists has. Only who may act for every
// Cluster learns that there is none.
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

// actable is [Agent.readable] for calls that act on claims of the holder.
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

// edit applies f to the state and then shows the result.
func (a *Agent) edit(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	a.publish()
}

// after applies f to the state after the delay, or never for [Manual]. It is called with the lock held; without a delay f runs
// before it returns.
func (a *Agent) after(delay time.Duration, f func()) {
	switch {
	case delay < 0:
	case delay == 0:
		f()
	default:
		// In a goroutine of its own: a fake clock calls with its lock held, and f asks for the time.
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
