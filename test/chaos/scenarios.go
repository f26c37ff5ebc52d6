package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/faults"
)

// Reasons with which a wanted claim ends.
const (
	machineLost = "MachineLost"
	failed      = "Failed"
	groupGone   = "NodeGroupGone"
)

// scenarios returns all scenarios, in the order of the table.
func scenarios() []*scenario {
	return []*scenario{
		{
			name: "calm", about: "nothing goes wrong: what the others are to be compared with",
			run: calm,
		},
		{
			name: "fail points", about: "the agent is killed before, after and while it makes each write of the protocol",
			run: failPoints, short: failPointsShort, losses: []string{failed, machineLost},
		},
		{
			name: "two agents", about: "two agents are active at once and killed at random; callers call either",
			run: twoAgents, short: twoAgentsShort,
		},
		{
			name: "Karpenter", about: "agent and shim are killed every few seconds while Karpenter scales up and down",
			run: karpenterScales,
		},
		{
			name: "switch", about: "53 Nodes of another provider are taken over; agents and shim are killed meanwhile, and the hub is away for a while",
			run: liveSwitch,
		},
		{
			name: "controllers stopped", about: "Cluster API's controllers are suspended for 90 s in the middle of it; its webhooks answer",
			run: func(ctx context.Context, r *run) error {
				return r.suspended(ctx, 90*time.Second, sandbox.ClusterAPI)
			},
			losses: []string{failed}, // Machines whose infrastructure Cluster API removes when a call to create one times out
		},
		{
			name: "Cluster API stopped", about: "controllers and webhooks are suspended for 45 s: no write on its objects succeeds",
			run: func(ctx context.Context, r *run) error {
				return r.suspended(ctx, 45*time.Second, sandbox.ClusterAPI, sandbox.ClusterAPIWebhooks)
			},
			losses: []string{failed},
		},
		{
			name: "API refuses", about: "a tenth of the agent's requests is answered with 429 and Retry-After, 500 or 503",
			run: func(ctx context.Context, r *run) error { return r.apiFaults(ctx, refusals, apiFor) },
		},
		{
			name: "API loses answers", about: "writes are applied and answered with a timeout or not at all; connections are reset before a request arrives",
			run:   func(ctx context.Context, r *run) error { return r.apiFaults(ctx, losses, apiFor) },
			short: func(ctx context.Context, r *run) error { return r.apiFaults(ctx, losses, apiForShort) },
		},
		{
			name: "stale watches", about: "the agent's watches stall for seconds, and go on where they were",
			run: staleWatches,
		},
		{
			name: "compaction", about: "the agent's watches and their renewal are answered with 410 Gone",
			run: compaction,
		},
		{
			name: "events unseen", about: "single events of the agents' watches are lost, and no agent is told; one is killed meanwhile",
			run: eventsUnseen,
		},
		{
			name: "rollout", about: "claims are released from three MachineSets of an OnDelete rollout; the agent is killed meanwhile",
			run: rollout,
		},
		{
			name: "health checks", about: "a MachineHealthCheck remediates claimed and unclaimed Machines; the agent is killed meanwhile",
			run: healthChecks, losses: []string{machineLost},
		},
		{
			name: "human scales", about: "a person scales the node groups up and down while claims come and go",
			run: humanScales, losses: []string{machineLost},
		},
		{
			name: "ledger wiped", about: "the ledger is removed again and again, as kubectl replace does, while claims come and go",
			run: ledgerWiped,
		},
		{
			name: "ledger edited", about: "a person edits the ledger: broken text, forgotten entries, invented ones, another floor",
			run: ledgerEdited,
		},
		{
			name: "no capacity", about: "five claims allow a node group without capacity and a good one",
			run: noCapacity, losses: []string{failed},
		},
		{
			name: "blocked", about: "Cluster API's preflight checks block a node group; its claims are taken back",
			run: blockedGroups, losses: []string{failed},
		},
		{
			name: "groups deleted", about: "a person deletes node groups, some in the middle of a rollout, while claims come and go; the agent is killed",
			run: groupsDeleted, losses: []string{machineLost, groupGone},
		},
		{
			name: "random kills", about: "the agent is killed every few seconds while claims come and go, until there were as many as asked for",
			run: randomKills,
		},
	}
}

const (
	// loadFor is how long the load lasts in most scenarios.
	loadFor = 60 * time.Second
	// loadForShort is the same in the short form.
	loadForShort = 10 * time.Second
	apiFor       = 35 * time.Second
	apiForShort  = 10 * time.Second
)

// usual returns the load of most scenarios.
func usual(groups ...*group) mix {
	choices := on(groups...)
	if len(groups) > 1 {
		choices = append(choices, lo.Map(groups, func(g *group, _ int) string { return g.name }))
	}
	return mix{workers: 14, choices: choices, hold: 2 * time.Second, pace: 300 * time.Millisecond}
}

func calm(ctx context.Context, r *run) error {
	a, b := newGroup("calm-a", 1, 20), newGroup("calm-b", 0, 12)
	return r.with(ctx, []*group{a, b}, func() error {
		l := r.startLoad(ctx, usual(a, b))
		defer l.finish()
		return wait(ctx, loadFor/2)
	})
}

func randomKills(ctx context.Context, r *run) error {
	a, b := newGroup("kills-a", 1, 20), newGroup("kills-b", 0, 12)
	return r.with(ctx, []*group{a, b}, func() error {
		l := r.startLoad(ctx, usual(a, b))
		stop := r.killing(ctx, time.Second, 4*time.Second, sandbox.Agent)
		defer l.finish()
		defer stop()
		for began := time.Now(); time.Since(began) < loadFor || r.lacks(); {
			if time.Since(began) > killsWithin {
				return fmt.Errorf("%s were not enough for %d claims and releases", killsWithin, r.options.Claims)
			}
			if err := wait(ctx, time.Second); err != nil {
				return err
			}
		}
		return nil
	})
}

// killsWithin bounds the time spent on reaching the number of claims.
const killsWithin = 45 * time.Minute

// lacks reports whether all scenarios so far have made fewer claims or releases than requested.
func (r *run) lacks() bool {
	c := r.counts()
	return min(c.claims, c.releases) < r.options.Claims
}

func twoAgents(ctx context.Context, r *run) error      { return r.active(ctx, loadFor) }
func twoAgentsShort(ctx context.Context, r *run) error { return r.active(ctx, loadForShort) }

// active runs two agents at the same time.
func (r *run) active(ctx context.Context, d time.Duration) error {
	if err := r.useAgents(ctx, agents); err != nil {
		return err
	}
	a, b := newGroup("two-a", 1, 20), newGroup("two-b", 0, 12)
	return errors.Join(r.with(ctx, []*group{a, b}, func() error {
		l := r.startLoad(ctx, usual(a, b))
		stop := r.killing(ctx, time.Second, 3*time.Second, lo.Times(agents, sandbox.AgentName)...)
		err := wait(ctx, d)
		stop()
		l.finish()
		return err
	}), r.useAgents(ctx, 1))
}

// suspended suspends components under load.
func (r *run) suspended(ctx context.Context, d time.Duration, components ...string) error {
	a, b := newGroup("stopped-a", 1, 14), newGroup("stopped-b", 0, 8)
	return r.with(ctx, []*group{a, b}, func() error {
		l := r.startLoad(ctx, usual(a, b))
		defer l.finish()
		stop := r.killing(ctx, 3*time.Second, 9*time.Second, sandbox.Agent)
		defer stop()
		if err := wait(ctx, 12*time.Second); err != nil {
			return err
		}
		for _, c := range components {
			r.fault("%s is suspended", c)
			if err := r.Sandbox.Suspend(c); err != nil {
				return err
			}
		}
		err := wait(ctx, d)
		for _, c := range components {
			if err := r.Sandbox.Resume(c); err != nil {
				return err
			}
		}
		r.journal.add("resumed: %v", components)
		if err != nil {
			return err
		}
		return wait(ctx, 12*time.Second)
	})
}

// apiFaults injects faults into the agent's requests.
func (r *run) apiFaults(ctx context.Context, plan func(*faults.Request) faults.Fault, d time.Duration) error {
	a, b := newGroup("api-a", 1, 20), newGroup("api-b", 0, 12)
	return r.with(ctx, []*group{a, b}, func() error {
		var mu sync.Mutex
		seen := map[string]int{}
		r.plans(func(_ string, q *faults.Request) faults.Fault {
			fault := plan(q)
			if fault.Kind != faults.None {
				mu.Lock()
				defer mu.Unlock()
				seen[fault.Kind.String()]++
			}
			return fault
		})
		l := r.startLoad(ctx, usual(a, b))
		err := wait(ctx, d)
		r.plans(nil)
		l.finish()
		mu.Lock()
		defer mu.Unlock()
		r.row.Notes = append(r.row.Notes, strings.Join(lo.Map(slices.Sorted(maps.Keys(seen)), func(k string, _ int) string {
			return fmt.Sprintf("%s %d", k, seen[k])
		}), ", "))
		return err
	})
}

func refusals(q *faults.Request) faults.Fault {
	if q.Verb == "" || rand.IntN(10) > 0 {
		return faults.Fault{}
	}
	return faults.Fault{Kind: lo.Sample([]faults.Kind{faults.TooMany, faults.InternalError, faults.Unavailable})}
}

func losses(q *faults.Request) faults.Fault {
	roll := rand.IntN(100)
	switch {
	case q.Write() && q.Class != faults.Ignored && roll < 10:
		return faults.Fault{Kind: faults.TimeoutAfter}
	case q.Write() && q.Class != faults.Ignored && roll < 16:
		return faults.Fault{Kind: faults.Cut}
	case q.Verb != "" && q.Verb != "watch" && roll >= 97:
		return faults.Fault{Kind: faults.Reset}
	case q.Write() && roll >= 90:
		return faults.Fault{Kind: faults.Slow, Delay: between(0, 3*time.Second)}
	}
	return faults.Fault{}
}

func staleWatches(ctx context.Context, r *run) error {
	if err := r.useAgents(ctx, agents); err != nil { // changes by one agent are what the other does not see
		return err
	}
	a, b := newGroup("stale-a", 1, 20), newGroup("stale-b", 0, 12)
	return errors.Join(r.with(ctx, []*group{a, b}, func() error {
		l := r.startLoad(ctx, usual(a, b))
		defer l.finish()
		for began := time.Now(); time.Since(began) < loadFor; {
			name := lo.Sample(lo.Keys(r.proxies))
			r.fault("the watches of %s stall", name)
			r.proxies[name].Freeze()
			err := wait(ctx, between(2*time.Second, 12*time.Second))
			r.proxies[name].Thaw()
			if err != nil {
				return err
			}
			if err := wait(ctx, between(0, 3*time.Second)); err != nil {
				return err
			}
		}
		return nil
	}), r.useAgents(ctx, 1))
}

// eventsUnseen hides single events from one of two agents at a time, so that the other one sees
// what has to be done. The agent with hidden events is killed or lists again before it is the
// other's turn.
func eventsUnseen(ctx context.Context, r *run) error {
	if err := r.useAgents(ctx, agents); err != nil {
		return err
	}
	a, b := newGroup("unseen-a", 1, 20), newGroup("unseen-b", 0, 12)
	return errors.Join(r.with(ctx, []*group{a, b}, func() error {
		l := r.startLoad(ctx, usual(a, b))
		defer l.finish()
		for began := time.Now(); time.Since(began) < loadFor; {
			name := lo.Sample(lo.Keys(r.proxies))
			proxy := r.proxies[name]
			before := proxy.Hidden()
			for range 5 + rand.IntN(10) {
				proxy.Hide(lo.Sample([]string{"machinedeployments", "machinesets", "machines", "machineclaims"}))
				if err := wait(ctx, between(200*time.Millisecond, time.Second)); err != nil {
					return err
				}
			}
			for range proxy.Hidden() - before {
				r.fault("an event is hidden from %s", name)
			}
			proxy.Show()
			if rand.IntN(2) == 0 {
				_ = r.kill(name)
			}
			proxy.ExpireWatches()
			if err := wait(ctx, between(time.Second, 4*time.Second)); err != nil {
				return err
			}
		}
		return nil
	}), r.useAgents(ctx, 1))
}

func compaction(ctx context.Context, r *run) error {
	a, b := newGroup("gone-a", 1, 20), newGroup("gone-b", 0, 12)
	return r.with(ctx, []*group{a, b}, func() error {
		r.plans(func(_ string, q *faults.Request) faults.Fault {
			if q.Verb == "watch" && rand.IntN(2) == 0 {
				return faults.Fault{Kind: faults.Expired}
			}
			return faults.Fault{}
		})
		l := r.startLoad(ctx, usual(a, b))
		defer l.finish()
		for began := time.Now(); time.Since(began) < apiFor; {
			if err := wait(ctx, between(500*time.Millisecond, 4*time.Second)); err != nil {
				return err
			}
			r.fault("watches expire")
			r.proxies[sandbox.Agent].ExpireWatches()
			if rand.IntN(3) == 0 {
				r.proxies[sandbox.Agent].ResetConnections()
			}
		}
		return nil
	})
}

// rollout makes claims on three MachineSets, and releases them while the template changes back and
// forth.
func rollout(ctx context.Context, r *run) error {
	g := newGroup("rollout", 1, 24)
	g.onDelete = true
	return r.with(ctx, []*group{g}, func() error {
		for revision := range 3 {
			if revision > 0 {
				if err := r.rollOut(ctx, g); err != nil {
					return err
				}
			}
			for range 4 {
				if _, err := r.holders.create(ctx, g.name); err != nil {
					return err
				}
			}
			if err := r.awaitNodes(ctx, g, 1+4*(revision+1)); err != nil {
				return err
			}
		}
		old := r.holders.wanted()
		l := r.startLoad(ctx, mix{workers: 6, choices: on(g), hold: 4 * time.Second, pace: 4 * time.Second})
		defer l.finish()
		stop := r.killing(ctx, 2*time.Second, 6*time.Second, sandbox.Agent)
		defer stop()
		began := time.Now()
		for i := 0; time.Since(began) < loadFor+30*time.Second; i++ {
			if i < len(old) {
				if err := r.holders.release(ctx, old[i], i%2 == 0); err != nil {
					return err
				}
			}
			if err := wait(ctx, between(time.Second, 4*time.Second)); err != nil {
				return err
			}
			if i%2 == 0 {
				if _, err := r.flipWhenQuiet(ctx, g, fmt.Sprintf("%s-r%d", g.name, rand.IntN(3))); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// flipWhenQuiet changes the template of a group at a moment when no Machines are being made, and
// reports whether there was such a moment soon enough.
func (r *run) flipWhenQuiet(ctx context.Context, g *group, template string) (bool, error) {
	for range 40 {
		if done, err := r.flip(ctx, g, template); done || err != nil {
			return done, err
		}
		if err := wait(ctx, 100*time.Millisecond); err != nil {
			return false, err
		}
	}
	return false, nil
}

// flip changes the template of a group, unless Machines are being made. If the template changes
// meanwhile, Cluster API itself deletes what an old MachineSet has made, and the cause of a
// deletion could not be determined.
func (r *run) flip(ctx context.Context, g *group, template string) (bool, error) {
	// Read before the MachineSets, which are written before the observed state.
	var md clusterv1.MachineDeployment
	if err := r.Hub.Get(ctx, g.key(), &md); err != nil {
		return false, err
	}
	var sets clusterv1.MachineSetList
	ofGroup := client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: g.name}
	if err := r.Hub.List(ctx, &sets, client.InNamespace(sandbox.ClusterNamespace), ofGroup); err != nil {
		return false, err
	}
	growing := lo.SomeBy(sets.Items, func(s clusterv1.MachineSet) bool {
		return ptr.Deref(s.Spec.Replicas, 0) > ptr.Deref(s.Status.Replicas, 0) || s.Status.ObservedGeneration < s.Generation
	})
	text := md.Annotations[agentv1.LedgerAnnotation]
	if growing || waiting(text) > 0 || md.Status.ObservedGeneration < md.Generation {
		return false, nil
	}
	patch, err := json.Marshal([]operation{
		// Replicas are only raised together with a change of the ledger. An absent ledger is null.
		test("/metadata/annotations/"+strings.ReplaceAll(agentv1.LedgerAnnotation, "/", "~1"), lo.Ternary[any](text == "", nil, text)),
		replace("/spec/template/spec/infrastructureRef/name", template),
	})
	if err != nil {
		return false, err
	}
	switch err := r.Hub.Patch(ctx, &md, client.RawPatch(types.JSONPatchType, patch)); {
	case apierrors.IsInvalid(err):
		return false, nil
	case err != nil:
		return false, err
	}
	r.fault("the template of %s becomes %s", g.name, template)
	return true, nil
}

// healthChecks makes Cluster API's own controller of MachineHealthChecks replace Machines.
func healthChecks(ctx context.Context, r *run) error {
	g := newGroup("health", 2, 14)
	check := &clusterv1.MachineHealthCheck{
		ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: g.name},
		Spec: clusterv1.MachineHealthCheckSpec{
			ClusterName: sandbox.ClusterName,
			Selector:    metav1.LabelSelector{MatchLabels: map[string]string{clusterv1.MachineDeploymentNameLabel: g.name}},
			Checks: clusterv1.MachineHealthCheckChecks{UnhealthyNodeConditions: []clusterv1.UnhealthyNodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionFalse, TimeoutSeconds: new(int32(0))},
			}},
		},
	}
	return r.with(ctx, []*group{g}, func() error {
		if err := r.Hub.Create(ctx, check); err != nil {
			return err
		}
		before, err := r.remediations(ctx)
		if err != nil {
			return err
		}
		l := r.startLoad(ctx, mix{workers: 8, choices: on(g), hold: 6 * time.Second, pace: 500 * time.Millisecond})
		stop := r.killing(ctx, 2*time.Second, 8*time.Second, sandbox.Agent)
		made := 0
		for began := time.Now(); time.Since(began) < loadFor+15*time.Second; {
			if err := wait(ctx, between(time.Second, 3*time.Second)); err != nil {
				break
			}
			hurt, err := r.hurt(ctx, g)
			if err != nil {
				stop()
				l.finish()
				return err
			}
			made += lo.Ternary(hurt, 1, 0)
		}
		stop()
		l.finish()
		after, err := r.remediations(ctx)
		if err != nil {
			return err
		}
		r.row.Notes = append(r.row.Notes, fmt.Sprintf("%d Machines made unhealthy, %d remediations", made, after-before))
		if after == before {
			return errors.New("the MachineHealthCheck has remediated nothing, so nothing was shown")
		}
		// Its last remediations are in progress, and the scenario need not wait for them.
		return client.IgnoreNotFound(r.Hub.Delete(ctx, check))
	})
}

// remediations returns the number of Machines that MachineHealthChecks have marked for remediation
// so far.
func (r *run) remediations(ctx context.Context) (int, error) {
	var told corev1.EventList
	err := r.Hub.List(ctx, &told, client.InNamespace(sandbox.ClusterNamespace), client.MatchingFields{"reason": "MachineMarkedUnhealthy"})
	return len(told.Items), err
}

// hurt makes one Machine unhealthy through its Node: not ready, or gone.
func (r *run) hurt(ctx context.Context, g *group) (bool, error) {
	machines, err := r.machines(ctx, g)
	if err != nil {
		return false, err
	}
	healthy := lo.Filter(machines, func(m clusterv1.Machine, _ int) bool {
		return m.DeletionTimestamp.IsZero() && m.Status.NodeRef.Name != ""
	})
	if len(healthy) == 0 {
		return false, nil
	}
	m := lo.Sample(healthy)
	r.fault("Node %s of Machine %s is unhealthy", m.Status.NodeRef.Name, m.Name)
	// Cluster API deletes it, as the user requested with the MachineHealthCheck.
	r.intent.update(func() { r.intent.deleted[m.UID] = true })
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.Status.NodeRef.Name}}
	if rand.IntN(4) == 0 {
		return true, client.IgnoreNotFound(r.Spoke.Delete(ctx, node))
	}
	patch := []byte(`{"status":{"conditions":[{"type":"Ready","status":"False","reason":"Chaos","message":"made so by the test"}]}}`)
	return true, client.IgnoreNotFound(r.Spoke.Status().Patch(ctx, node, client.RawPatch(types.StrategicMergePatchType, patch)))
}

// humanScales runs a scenario in which a user changes replicas.
func humanScales(ctx context.Context, r *run) error {
	a, b := newGroup("human-a", 2, 14), newGroup("human-b", 0, 10)
	return r.with(ctx, []*group{a, b}, func() error {
		l := r.startLoad(ctx, usual(a, b))
		defer l.finish()
		stop := r.killing(ctx, 3*time.Second, 9*time.Second, sandbox.Agent)
		defer stop()
		given := map[string]int32{a.name: a.own, b.name: b.own}
		for began := time.Now(); time.Since(began) < loadFor; {
			if err := wait(ctx, between(time.Second, 4*time.Second)); err != nil {
				return err
			}
			g := lo.Sample([]*group{a, b})
			by := int32(rand.IntN(3) + 1)
			// A user does not remove more than the user's own: that would be a claim's machine.
			if given[g.name] >= by && (rand.IntN(2) == 0 || given[g.name] > 3) {
				by = -by
			}
			if given[g.name]+by > 4 {
				continue
			}
			r.fault("a person scales %s by %d", g.name, by)
			if err := r.scale(ctx, g, by); err != nil {
				return err
			}
			given[g.name] += by
		}
		return nil
	})
}

// ledgerWiped leaves room in the groups. Each time the ledger is rebuilt, a Machine that joined
// before a claim had it becomes the user's. At the max size, waiting claims would then fail with
// their deadline, as described in docs/claims.md.
func ledgerWiped(ctx context.Context, r *run) error { return r.ledgers(ctx, 60, (*run).wipe) }

func ledgerEdited(ctx context.Context, r *run) error { return r.ledgers(ctx, 20, (*run).editLedger) }

// ledgers lets a user tamper with the ledgers at intervals, and finally set replicas to the number
// that is the user's.
func (r *run) ledgers(ctx context.Context, most int32, do func(*run, context.Context, *group) error) error {
	a, b := newGroup("ledger-a", 2, most), newGroup("ledger-b", 1, most)
	return r.with(ctx, []*group{a, b}, func() error {
		l := r.startLoad(ctx, usual(a, b))
		stop := r.killing(ctx, 4*time.Second, 12*time.Second, sandbox.Agent)
		var err error
		for began := time.Now(); time.Since(began) < loadFor && err == nil; {
			if err = wait(ctx, between(3*time.Second, 8*time.Second)); err == nil {
				err = do(r, ctx, lo.Sample([]*group{a, b}))
			}
		}
		stop()
		l.finish()
		if err != nil {
			return err
		}
		if err := r.settle(ctx); err != nil {
			return err
		}
		// The user removes what the loss of the ledger assigned to the user. After that the numbers
		// are exact again.
		for _, g := range []*group{a, b} {
			if err := r.takeBack(ctx, g); err != nil {
				return err
			}
		}
		return nil
	})
}

// takeBack sets the replicas of a group without claims to the number that is the user's.
func (r *run) takeBack(ctx context.Context, g *group) error {
	return r.rewrite(ctx, g, func(md *clusterv1.MachineDeployment) edit {
		replicas := ptr.Deref(md.Spec.Replicas, 0)
		share := r.intent.expected().Shares[g.name]
		surplus := replicas - share.Own
		r.row.Notes = append(r.row.Notes, fmt.Sprintf("%s: %d of at most %d machines had become the user's", g.name, surplus, share.Unclear))
		return edit{
			patch: []operation{test("/spec/replicas", replicas), replace("/spec/replicas", share.Own)},
			begin: func() {
				r.intent.update(func() { r.intent.lowered[g.name] += int(surplus) })
				r.intent.share(g.name, 0, -share.Unclear)
			},
		}
	})
}

// editLedger changes the ledger like a user who edits it by hand.
func (r *run) editLedger(ctx context.Context, g *group) error {
	path := "/metadata/annotations/" + strings.ReplaceAll(agentv1.LedgerAnnotation, "/", "~1")
	kind := rand.IntN(5)
	r.fault("editing the ledger of %s: %d", g.name, kind)
	return r.rewrite(ctx, g, func(md *clusterv1.MachineDeployment) edit {
		text, there := md.Annotations[agentv1.LedgerAnnotation]
		var l map[string]any
		if !there || json.Unmarshal([]byte(text), &l) != nil {
			return edit{patch: []operation{}}
		}
		var own, unclear int32
		switch kind {
		case 0: // no ledger any more; what an earlier edit removed is unknown as well
			l, unclear = nil, inFlight(text)+r.forgotten(ctx, g, text)
		case 1: // waiting claims are forgotten
			delete(l, "pending")
		case 2: // releases are forgotten
			delete(l, "releasing")
		case 3: // a release is invented, of a Machine that a claim has
			invent(l, r.claimed(g))
		case 4: // the user owns one more
			floor, _ := l["floor"].(float64)
			l["floor"], own = floor+1, 1
			if last, _ := l["lastReplicas"].(float64); floor+1 > last {
				return edit{patch: []operation{}}
			}
		}
		edited := "{ this is not a ledger"
		if l != nil {
			data, err := json.Marshal(l)
			if err != nil {
				panic(err) // it was decoded from JSON
			}
			edited = string(data)
		}
		return edit{
			patch: []operation{test(path, text), replace(path, edited)},
			begin: func() { r.intent.share(g.name, own, unclear) },
			end: func(applied bool) {
				if !applied {
					r.intent.share(g.name, -own, -unclear)
				}
			},
		}
	})
}

// forgotten returns the number of Machines of the group that are being deleted and are not in the
// ledger. Whether their replicas were decremented is then unknown.
func (r *run) forgotten(ctx context.Context, g *group, ledger string) int32 {
	machines, err := r.machines(ctx, g)
	if err != nil {
		return 0 // the edit then fails as well
	}
	return int32(lo.CountBy(machines, func(m clusterv1.Machine) bool {
		return !m.DeletionTimestamp.IsZero() && !strings.Contains(ledger, string(m.UID))
	}))
}

// invent adds a release to a ledger.
func invent(l map[string]any, m *clusterv1.Machine) {
	if m == nil {
		return
	}
	releasing, _ := l["releasing"].(map[string]any)
	if releasing == nil {
		releasing = map[string]any{}
	}
	releasing[string(m.UID)] = map[string]any{"m": m.Name}
	l["releasing"] = releasing
}

// claimed returns a Machine of the group that a wanted claim has, or nil.
func (r *run) claimed(g *group) *clusterv1.Machine {
	ctx, cancel := context.WithTimeout(context.Background(), attemptWithin)
	defer cancel()
	for _, id := range r.holders.wanted() {
		if c := r.auditor.Claim(id); c == nil || c.Group != g.name || c.Phase != agentv1.PhaseBound {
			continue
		}
		if m, err := r.machineOf(ctx, id); err == nil && m != nil {
			return m
		}
	}
	return nil
}

// triesAtMost is the maximum number of claims, each allowing a failing and a good group, that a
// caller may need until it has a Machine of the good one. On a slow machine the cool-down may be
// over before the caller retries.
const triesAtMost = 3

// noCapacity lets five callers claim a machine of either of two groups, the first of which has no
// capacity. A claim that fails is made again under another id, as Karpenter creates another
// NodeClaim.
func noCapacity(ctx context.Context, r *run) error {
	bad, good := newGroup("capacity-bad", 0, 10), newGroup("capacity-good", 0, 20)
	bad.failure = &simv1.MachineFailure{Reason: "InsufficientCapacity", Message: "the zone has none left"}
	return r.with(ctx, []*group{bad, good}, func() error {
		rounds := lo.Ternary(r.short, 1, 3)
		for round := range rounds {
			began := time.Now()
			var asking sync.WaitGroup
			tries := make([]int, 5)
			for i := range tries {
				asking.Go(func() {
					for ctx.Err() == nil && tries[i] <= triesAtMost {
						id, err := r.holders.create(ctx, bad.name, good.name)
						if err != nil || id == "" {
							continue
						}
						tries[i]++
						if r.joins(ctx, id) {
							return
						}
					}
				})
			}
			asking.Wait()
			r.row.Notes = append(r.row.Notes, fmt.Sprintf("round %d: five callers had a machine of the good group after %.1f s, with %d claims at most",
				round+1, time.Since(began).Seconds(), slices.Max(tries)))
			if slices.Max(tries) > triesAtMost {
				return fmt.Errorf("callers needed %v claims until one was on the good node group", tries)
			}
			if err := r.releaseAll(ctx); err != nil {
				return err
			}
			if err := wait(ctx, coolDown+time.Second); err != nil { // so that the next round begins with the bad group again
				return err
			}
		}
		return nil
	})
}

// joins waits until the claim has a Machine with a provider ID. It returns false if the claim
// ended.
func (r *run) joins(ctx context.Context, id string) bool {
	for ctx.Err() == nil {
		if r.phase(id) == agentv1.PhaseEnded || r.phase(id) == agentv1.PhaseReleasing {
			r.holders.drop(id)
			return false
		}
		if m, err := r.machineOf(ctx, id); err == nil && m != nil && m.Spec.ProviderID != "" {
			return true
		}
		_ = wait(ctx, pause)
	}
	return false
}

// blockedGroups makes claims on a group whose Machines Cluster API does not make, and releases
// them.
func blockedGroups(ctx context.Context, r *run) error {
	bad, good := newGroup("blocked-bad", 0, 10), newGroup("blocked-good", 1, 10)
	bad.version = blockedVersion
	return r.with(ctx, []*group{bad, good}, func() error {
		l := r.startLoad(ctx, mix{workers: 4, choices: on(good), hold: time.Second, pace: time.Second})
		defer l.finish()
		stop := r.killing(ctx, 2*time.Second, 7*time.Second, sandbox.Agent)
		defer stop()
		var asking sync.WaitGroup
		ending, cancel := context.WithTimeout(ctx, 45*time.Second)
		defer cancel()
		for range 4 {
			asking.Go(func() {
				for ending.Err() == nil {
					_ = r.claimBlocked(ending, bad)
				}
			})
		}
		asking.Wait()
		return r.releaseOf(ctx, bad)
	})
}

func groupsDeleted(ctx context.Context, r *run) error {
	stays := newGroup("deleted-not", 1, 10)
	return r.with(ctx, []*group{stays}, func() error {
		stop := r.killing(ctx, 2*time.Second, 7*time.Second, sandbox.Agent)
		defer stop()
		for i := range 4 {
			if err := r.deleteBusy(ctx, fmt.Sprintf("deleted-%d", i), stays, i%2 == 1); err != nil {
				return err
			}
		}
		return nil
	})
}

// deleteBusy creates a node group, lets claims come and go there, and deletes it meanwhile.
func (r *run) deleteBusy(ctx context.Context, name string, other *group, several bool) error {
	g := newGroup(name, 2, 14)
	g.onDelete = several // then it has Machines of several MachineSets
	if err := r.build(ctx, g); err != nil {
		return fmt.Errorf("building a node group: %w", err)
	}
	l := r.startLoad(ctx, usual(g, other))
	defer l.finish()
	if err := wait(ctx, between(4*time.Second, 8*time.Second)); err != nil {
		return err
	}
	if several {
		g.revision++
		if err := r.Hub.Create(ctx, g.machineTemplate()); err != nil {
			return err
		}
		if _, err := r.flipWhenQuiet(ctx, g, g.template()); err != nil {
			return err
		}
		if err := wait(ctx, between(2*time.Second, 8*time.Second)); err != nil {
			return err
		}
	}
	r.holders.goes(g.name)
	r.fault("a person deletes %s", g.name)
	if err := r.raze(ctx, g); err != nil {
		return fmt.Errorf("deleting a node group: %w", err)
	}
	// Cluster API leaves the Nodes of Machines that it began to delete before they joined. In a
	// cloud, the cloud controller manager removes them.
	var nodes corev1.NodeList
	if err := r.Spoke.List(ctx, &nodes); err != nil {
		return err
	}
	left := lo.Filter(nodes.Items, func(n corev1.Node, _ int) bool { return strings.HasPrefix(n.Name, g.name+"-") })
	r.journal.add("%d Nodes of %s are left without Machines", len(left), g.name)
	for i := range left {
		if err := client.IgnoreNotFound(r.Spoke.Delete(ctx, &left[i])); err != nil {
			return err
		}
	}
	return nil
}
