package abuse

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/samber/lo"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/loadgen"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

const (
	// keptGroup is the node group of the claims that the victim keeps; their machines run.
	// trickleGroup is that of the claims that it makes and releases. Its machines never boot, so
	// that the cost of a claim outside the agent and the API server is constant.
	keptGroup, trickleGroup = "kept", "trickle"
	keptClaims              = 3
	// interval is the time between two claims of the trickle. Each is released after lifetime
	// intervals.
	interval = 250 * time.Millisecond
	lifetime = 8
	// dialEvery is the number of claims between two new connections, and syncEvery that between two
	// rounds of a shim.
	dialEvery, syncEvery = 8, 4
	// callTimeout bounds a call of the victim, and its attempts to reconnect. It exceeds a shim's
	// timeout, because the machine may be busy. The duration of calls is judged separately.
	callTimeout = time.Minute
	// restWithin bounds how long the trickle takes to come to rest.
	restWithin = 2 * time.Minute
)

// samples are durations of the victim's calls.
type samples struct {
	create, release []time.Duration
	// connect is the time from the start of a new connection to the first answer on it.
	connect []time.Duration
	// round is the time of what a shim does every ten seconds: it lists its claims and node groups,
	// and reports which of the claims have owners.
	round []time.Duration
}

func (s *samples) add(other samples) {
	s.create = append(s.create, other.create...)
	s.release = append(s.release, other.release...)
	s.connect = append(s.connect, other.connect...)
	s.round = append(s.round, other.round...)
}

// victim is the tenant under attack.
type victim struct {
	env   *loadgen.Env
	agent *agentclient.Client
	// machines are the machines of the kept claims, by claim.
	machines map[string]string
	made     int
}

func victimCluster() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}
}

// connectVictim opens a client connection as the victim.
func connectVictim(env *loadgen.Env) (*agentclient.Client, error) {
	state := env.Sandbox.State()
	return agentclient.New(agentclient.Options{
		Address: state.AgentAddress, Timeout: callTimeout,
		TLS: &agentclient.TLS{CertFile: state.Paths.ClientCertificate, KeyFile: state.Paths.ClientKey, CAFile: state.Paths.AgentCA},
	})
}

// newVictim makes the kept claims and waits until their machines run.
func newVictim(ctx context.Context, env *loadgen.Env) (*victim, error) {
	v := &victim{env: env, machines: map[string]string{}}
	for _, g := range []loadgen.Group{{Name: keptGroup, Max: keptClaims}, {Name: trickleGroup, Max: 50, Held: true}} {
		if err := env.CreateGroup(ctx, g); err != nil {
			return nil, err
		}
	}
	var err error
	if v.agent, err = connectVictim(env); err != nil {
		return nil, err
	}
	for i := range keptClaims {
		id := fmt.Sprintf("kept-%d", i)
		if err := v.create(ctx, id, keptGroup); err != nil {
			return nil, errors.Join(err, v.agent.Close())
		}
		v.machines[id] = ""
	}
	err = testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		claims, err := v.claims(ctx)
		for _, claim := range claims {
			v.machines[claim.GetClaimId()] = claim.GetMachine().GetName()
		}
		running := lo.CountBy(claims, func(c *agentv1alpha1.Claim) bool { return c.GetMachine().GetNodeName() != "" })
		return lo.Ternary(running == keptClaims, "", fmt.Sprintf("%d of %d kept claims to have a Node", keptClaims-running, keptClaims)), err
	})
	if err != nil {
		return nil, errors.Join(err, v.agent.Close())
	}
	return v, nil
}

func (v *victim) close() { _ = v.agent.Close() } // its error does not matter

func (v *victim) create(ctx context.Context, id, group string) error {
	_, err := v.agent.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
		Cluster: victimCluster(), ClaimId: id, Holder: holder, Candidates: []string{sandbox.ClusterNamespace + "/" + group},
	})
	return err
}

func (v *victim) release(ctx context.Context, id string) error {
	_, err := v.agent.Claims.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{Cluster: victimCluster(), ClaimId: id, Drained: true})
	return err
}

// claims returns the victim's claims that have not ended.
func (v *victim) claims(ctx context.Context) ([]*agentv1alpha1.Claim, error) {
	r, err := v.agent.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: victimCluster(), Holder: holder})
	return r.GetClaims(), err
}

// round makes the calls of a shim's round.
func (v *victim) round(ctx context.Context) error {
	listed, err := v.agent.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: victimCluster(), Holder: holder})
	if err != nil {
		return err
	}
	if _, err := v.agent.NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{Cluster: victimCluster()}); err != nil {
		return err
	}
	_, err = v.agent.Claims.SyncClaims(ctx, &agentv1alpha1.SyncClaimsRequest{
		Cluster: victimCluster(), Holder: holder, Token: listed.GetToken(),
		LiveClaimIds: lo.Map(listed.GetClaims(), func(c *agentv1alpha1.Claim, _ int) string { return c.GetClaimId() }),
	})
	return err
}

// connect makes a call on a new connection, and retries like a shim.
func (v *victim) connect(ctx context.Context) error {
	c, err := connectVictim(v.env)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		_, err := c.Status.GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
		return "", err
	})
	return errors.Join(err, c.Close())
}

// trickle makes n claims, one per interval regardless of the earlier ones, and releases each after
// its lifetime. The error joins the errors of all calls: none may fail.
func (v *victim) trickle(ctx context.Context, n int) (samples, error) {
	var (
		calls sync.WaitGroup
		mu    sync.Mutex
		taken samples
		errs  []error
	)
	timed := func(into *[]time.Duration, what string, call func() error) {
		began := time.Now()
		err := call()
		took := time.Since(began)
		mu.Lock()
		defer mu.Unlock()
		*into = append(*into, took)
		if err != nil {
			errs = append(errs, fmt.Errorf("the victim's %s, after %s: %w", what, took.Round(time.Millisecond), err))
		}
	}
	due := make([]chan struct{}, n)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for i := range n + lifetime {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return taken, context.Cause(ctx)
		}
		if i >= lifetime {
			close(due[i-lifetime])
		}
		if i >= n {
			continue
		}
		due[i] = make(chan struct{})
		v.made++
		id := fmt.Sprintf("trickle-%d", v.made)
		calls.Go(func() {
			timed(&taken.create, "CreateClaim", func() error { return v.create(ctx, id, trickleGroup) })
			select {
			case <-due[i]:
				timed(&taken.release, "ReleaseClaim", func() error { return v.release(ctx, id) })
			case <-ctx.Done():
			}
		})
		if i%syncEvery == 0 {
			calls.Go(func() { timed(&taken.round, "round", func() error { return v.round(ctx) }) })
		}
		if i%dialEvery == 0 {
			calls.Go(func() { timed(&taken.connect, "new connection", func() error { return v.connect(ctx) }) })
		}
	}
	calls.Wait()
	return taken, errors.Join(errs...)
}

// whole waits until the claims of the trickle have ended, and verifies that the kept claims still
// have their machines.
func (v *victim) whole(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, restWithin)
	defer cancel()
	var claims []*agentv1alpha1.Claim
	err := testenv.Poll(bounded, func(ctx context.Context) (string, error) {
		var err error
		claims, err = v.claims(ctx)
		return lo.Ternary(len(claims) <= keptClaims, "", fmt.Sprintf("%d claims of the victim to end", len(claims)-keptClaims)), err
	})
	if err != nil {
		return err
	}
	has := map[string]string{}
	for _, claim := range claims {
		if claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND {
			has[claim.GetClaimId()] = claim.GetMachine().GetName()
		}
	}
	for id, name := range v.machines {
		if has[id] != name {
			return fmt.Errorf("the victim's claim %s has Machine %q, and had %s", id, has[id], name)
		}
		var machine clusterv1.Machine
		err := v.env.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: name}, &machine)
		if apierrors.IsNotFound(err) || err == nil && !machine.DeletionTimestamp.IsZero() {
			return fmt.Errorf("the victim's Machine %s is gone, or about to go", name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// percentile returns the smallest value that p percent of the values do not exceed.
func percentile(d []time.Duration, p int) time.Duration {
	if len(d) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(d))
	return sorted[max(0, (len(sorted)*p+99)/100-1)]
}
