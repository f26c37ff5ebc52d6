package netchaos

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/badlink"
	"github.com/karpenter-capi/karpenter-capi/test/bystander"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/metrics"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	startWithin = 5 * time.Minute
	readyWithin = 2 * time.Minute
	agents      = 2
	// host is the agents' host name. Only this program and its child processes can resolve it.
	host = "agents.netchaos.test"
	// serverName is the name in the agents' certificates.
	serverName = "localhost"

	// crowd is the name of the node group, the NodePool, the NodeClass, and the Deployment whose
	// pods come and go.
	crowd = "crowd"
	// resident is the Deployment of the pods that stay, each on its own Node.
	resident  = "resident"
	residents = 2
)

// environment is a sandbox whose shim reaches the agents across a link.
type environment struct {
	*testenv.Env

	link      *badlink.Link
	names     *badlink.Names
	bystander *bystander.Bystander
	watch     *watch

	// agent is the agent that the name leads to, and address the link's address for it.
	agent   int
	address netip.Addr
}

// product lists the default values of the product's periods that matter in a long outage.
var product = []struct {
	option string
	period time.Duration
	agents bool
}{
	{"HUB_UNREACHABLE_GRACE_PERIOD", 2 * time.Minute, false},
	{"LAUNCH_TIMEOUT", 5 * time.Minute, false},
	{"CLAIM_SYNC_INTERVAL", time.Minute, false},
	{"UNAVAILABLE_OFFERING_TTL", 30 * time.Second, false},
	{"--spare-grace-period", time.Minute, true},
	{"--collect-grace-period", 30 * time.Second, true},
	{"--sync-token-lifetime", 10 * time.Minute, true},
	{"--failure-cool-down", 3 * time.Minute, true},
}

// newEnvironment starts everything, on a good link.
func newEnvironment(ctx context.Context, o Options) (*environment, error) {
	link, err := badlink.New()
	if err != nil {
		return nil, err
	}
	s := &environment{link: link}
	if s.names, err = badlink.NewNames(); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	options := sandbox.Options{
		Name: o.Name, Agents: agents,
		ShimEnv: []string{"AGENT_SERVER_NAME=" + serverName},
	}
	for _, p := range product {
		setting := fmt.Sprintf("%s=%s", p.option, p.period/time.Duration(o.Compress))
		if p.agents {
			options.AgentArgs = append(options.AgentArgs, setting)
		} else {
			options.ShimEnv = append(options.ShimEnv, setting)
		}
	}
	starting, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	if s.Env, err = testenv.Start(starting, options, nil); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	s.Checker.Expected = func() invariants.Expected {
		return invariants.Expected{Shares: map[string]invariants.Share{crowd: {}}}
	}
	if err := s.setUp(starting); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

// setUp puts the link between shim and agents, and creates the objects that stay throughout.
func (s *environment) setUp(ctx context.Context) error {
	if err := s.lead(0); err != nil {
		return err
	}
	if err := s.Sandbox.PointShim(ctx, s.agents()); err != nil {
		return err
	}
	stay, err := manifests.LoadAs(manifests.CrowdWorkload, crowd, resident)
	if err != nil {
		return err
	}
	for _, o := range stay {
		use := map[string]string{"fleet.example.com/use": crowd}
		if err := errors.Join(
			unstructured.SetNestedStringMap(o.Object, use, "spec", "template", "spec", "nodeSelector"),
			unstructured.SetNestedField(o.Object, int64(residents), "spec", "replicas"),
		); err != nil {
			return err
		}
	}
	if err := errors.Join(
		manifests.Apply(ctx, s.Hub, manifests.CrowdHub), manifests.Apply(ctx, s.Spoke, manifests.CrowdSpoke), manifests.ApplyObjects(ctx, s.Spoke, stay...),
		manifests.Apply(ctx, s.Spoke, manifests.CrowdWorkload),
	); err != nil {
		return err
	}
	if err := s.AwaitNodePool(ctx, crowd); err != nil {
		return err
	}
	if err := s.Recorder.Await(ctx, func(j timeline.State) string {
		return lo.Ternary(j.Pods.Running == residents, "", fmt.Sprintf("%d pods to run: %d do", residents, j.Pods.Running))
	}); err != nil {
		return err
	}
	if err := s.settle(ctx); err != nil {
		return err
	}
	if s.bystander, err = bystander.Watch(context.WithoutCancel(ctx), s.Env); err != nil {
		return err
	}
	s.watch = watchShim(s)
	return nil
}

// agents returns the agents' address across the link, as host:port.
func (*environment) agents() string { return net.JoinHostPort(host, strconv.Itoa(badlink.Port)) }

// lead makes the agents' name resolve to an agent, through an address that was never used before.
func (s *environment) lead(agent int) error {
	server, err := netip.ParseAddrPort(s.Sandbox.State().AgentAddresses[agent])
	if err != nil {
		return err
	}
	address, err := s.link.Serve(server.Port())
	if err != nil {
		return err
	}
	s.agent, s.address = agent, address
	return s.names.Set(host, address)
}

// moveAgents makes the agents' name resolve to the other agent, and makes the former address
// unreachable.
func (s *environment) moveAgents() error {
	former := s.address
	if err := s.lead((s.agent + 1) % agents); err != nil {
		return err
	}
	return s.link.Lose(former)
}

// callAlone returns the median time of a CreateClaim call that only validates. It makes the calls
// one after the other on a separate connection.
func (s *environment) callAlone(ctx context.Context) (time.Duration, error) {
	const calls = 20
	paths := s.Sandbox.State().Paths
	c, err := agentclient.New(agentclient.Options{
		Address: s.agents(),
		TLS:     &agentclient.TLS{CertFile: paths.AdminCertificate, KeyFile: paths.AdminKey, CAFile: paths.AgentCA, ServerName: serverName},
	})
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close() }()
	var took []time.Duration
	for range 1 + calls { // the first call also connects
		began := time.Now()
		_, err := c.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: testenv.Cluster.Namespace, Name: testenv.Cluster.Name}, ClaimId: string(uuid.NewUUID()),
			Holder: "netchaos", Candidates: []string{testenv.Cluster.Namespace + "/" + crowd}, ValidateOnly: true,
		})
		if err != nil {
			return 0, err
		}
		took = append(took, time.Since(began))
	}
	took = took[1:]
	slices.Sort(took)
	return took[len(took)/2], nil
}

// settle waits until everything is at rest and every invariant holds.
func (s *environment) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	violations, err := s.Checker.Settle(ctx)
	if len(violations) > 0 {
		return &violated{violations}
	}
	return err
}

// scale sets the number of pods that come and go.
func (s *environment) scale(ctx context.Context, pods int) error {
	return s.Scale(ctx, types.NamespacedName{Namespace: "default", Name: crowd}, int32(pods))
}

// scaleAndWait scales, and waits until that many pods run and no unneeded Node is left.
func (s *environment) scaleAndWait(ctx context.Context, pods int) error {
	if err := s.scale(ctx, pods); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, podsWithin)
	defer cancel()
	total := residents + pods
	return s.Recorder.Await(ctx, func(j timeline.State) string {
		live := len(j.Live())
		return lo.Ternary(j.Pods.Running == total && j.Pods.Total() == total && live == total, "",
			fmt.Sprintf("%d pods to run, each on a Node: %d of %d run, and there are %d NodeClaims", total, j.Pods.Running, j.Pods.Total(), live))
	})
}

// restarts returns the number of restarts of agents and shim.
func (s *environment) restarts() int {
	return lo.SumBy(append(lo.Times(agents, sandbox.AgentName), sandbox.Shim), func(c string) int { return s.Status(c).Restarts })
}

// stop stops everything. The logs are kept.
func (s *environment) stop() error {
	if s.watch != nil {
		s.watch.stop()
	}
	if s.bystander != nil {
		s.bystander.Stop()
	}
	if s.Env != nil {
		s.Stop()
	}
	return s.link.Close()
}

// watch records when the shim starts and stops following the agents, and when its NodeClass
// becomes Ready and not Ready.
type watch struct {
	stop func()

	mu               sync.Mutex
	connected, ready []change
	fault            error
}

type change struct {
	at  time.Time
	yes bool
}

// sampleInterval is the precision of the watch. It is shorter than the shortest delay before a
// stream is reopened.
const sampleInterval = 100 * time.Millisecond

func watchShim(s *environment) *watch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &watch{}
	var watching sync.WaitGroup
	w.stop = func() {
		cancel()
		watching.Wait()
	}
	watching.Go(func() {
		ticker := time.NewTicker(sampleInterval)
		defer ticker.Stop()
		for {
			connected, connectedErr := s.connected(ctx)
			ready, readyErr := s.ready(ctx)
			w.note(connected, ready, errors.Join(connectedErr, readyErr))
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	})
	return w
}

// connected reports whether all of the shim's streams follow an agent, according to its metrics.
func (s *environment) connected(ctx context.Context) (bool, error) {
	const name = "karpenter_capi_agent_connected"
	families, err := metrics.Read(ctx, s.Sandbox.State().ShimMetrics)
	if err != nil {
		return false, err
	}
	streams := len(families.Of(name, nil))
	if streams == 0 {
		return false, errors.New("the shim does not tell whether it follows an agent")
	}
	return int(families.Sum(name, nil)) == streams, nil
}

func (s *environment) ready(ctx context.Context) (bool, error) {
	var class shimv1.ClusterAPINodeClass
	if err := s.Spoke.Get(ctx, client.ObjectKey{Name: crowd}, &class); err != nil {
		return false, err
	}
	return class.StatusConditions().Root().IsTrue(), nil
}

func (w *watch) note(connected, ready bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fault = err; err != nil {
		return
	}
	now := time.Now()
	for _, seen := range []struct {
		changes *[]change
		yes     bool
	}{{&w.connected, connected}, {&w.ready, ready}} {
		if len(*seen.changes) == 0 || lo.LastOrEmpty(*seen.changes).yes != seen.yes {
			*seen.changes = append(*seen.changes, change{now, seen.yes})
		}
	}
}

// now returns the shim's last known state. The error is why that is not known.
func (w *watch) now() (connected, ready bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return lo.LastOrEmpty(w.connected).yes, lo.LastOrEmpty(w.ready).yes, w.fault
}

// lostAfter returns when the shim first stopped following the agents after the given time, and when
// it was no longer Ready. Zero means never.
func (w *watch) lostAfter(since time.Time) (connected, ready time.Time) {
	return w.first(since, false)
}

// backAfter returns when the shim first followed the agents again after the given time, and when it
// was Ready.
func (w *watch) backAfter(since time.Time) (connected, ready time.Time) {
	return w.first(since, true)
}

func (w *watch) first(since time.Time, yes bool) (connected, ready time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	in := func(changes []change) time.Time {
		found, _ := lo.Find(changes, func(c change) bool { return c.yes == yes && !c.at.Before(since) })
		return found.at
	}
	return in(w.connected), in(w.ready)
}
