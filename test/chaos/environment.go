package chaos

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/test/faults"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

const (
	startWithin   = 5 * time.Minute
	restartWithin = time.Minute
	// agents is the number of agents of an environment. In most scenarios only the first runs.
	agents = 2

	spareGrace = 3 * time.Second
	coolDown   = 5 * time.Second
	// retention is how long tombstones are kept, which exceeds the time for which any caller here
	// retries a call that makes a claim.
	retention = 45 * time.Second
	// restartAfter is short, so that a killed agent's successor starts at once.
	restartAfter = 50 * time.Millisecond
)

// environment is a sandbox whose agents reach the hub through proxies, with everyone who acts on
// it.
type environment struct {
	*testenv.Env
	holders *holders
	intent  *intent
	auditor *invariants.Auditor
	watched *watchers
	points  *faults.Points
	proxies map[string]*faults.Proxy
	clients map[string]*client.Client
	journal *journal
	memory  *faults.Memory

	// serving is the number of agents that should run.
	serving int

	plan  atomic.Pointer[func(agent string, r *faults.Request) faults.Fault]
	kills atomic.Int64
	count atomic.Int64 // faults other than kills

	mu      sync.Mutex
	groups  []*group         // the existing ones
	box     *sandbox.Sandbox // nil before it runs
	strange []string         // writes of unknown class
}

// newEnvironment starts everything, with the first agent running.
func newEnvironment(ctx context.Context, o Options) (*environment, error) {
	holders := newHolders()
	s := &environment{
		holders: holders, intent: newIntent(holders), points: faults.NewPoints(1500 * time.Millisecond),
		proxies: map[string]*faults.Proxy{}, clients: map[string]*client.Client{}, journal: &journal{}, memory: &faults.Memory{},
	}
	starting, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	w, err := testenv.Start(starting, sandbox.Options{
		Name: o.Name, Agents: agents, AgentBinary: o.Agent, SeparateWebhooks: true, RestartAfter: restartAfter,
		AgentArgs: []string{
			"--spare-grace-period=" + spareGrace.String(), "--failure-cool-down=" + coolDown.String(),
			"--tombstone-retention=" + retention.String(), "--log-level=debug",
		},
		ShimEnv: []string{"CLAIM_SYNC_INTERVAL=10s"},
		AgentHub: func(agent string, hub sandbox.Endpoint) (sandbox.Endpoint, error) {
			proxy, err := s.proxy(agent, hub)
			if err != nil {
				return sandbox.Endpoint{}, err
			}
			return proxy.Endpoint(), nil
		},
	}, nil)
	if err != nil {
		s.closeProxies()
		return nil, err
	}
	s.Env = w
	s.mu.Lock()
	s.box = w.Sandbox
	s.mu.Unlock()
	if err := s.setUp(ctx); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

func (s *environment) proxy(agent string, hub sandbox.Endpoint) (*faults.Proxy, error) {
	proxy, err := faults.NewProxy(faults.Options{
		Server: hub, Memory: s.memory,
		Kill:      func() error { return s.kill(agent) },
		Succeeded: func() { s.awaitSuccessor(agent) },
		Plan: func(r *faults.Request) faults.Fault {
			fault := s.points.Plan(agent, r)
			if plan := s.plan.Load(); fault.Kind == faults.None && plan != nil {
				fault = (*plan)(agent, r)
			}
			if fault.Kind != faults.None {
				s.journal.add("%s: FAULT %s at %s %s %s %s", agent, fault.Kind, r.Verb, r.Resource, r.Name, r.Class)
				if !fault.Kind.Kills() {
					s.count.Add(1)
				}
			}
			return fault
		},
		Seen: func(r *faults.Request) { s.see(agent, r) },
		Strange: func(err error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.strange = append(s.strange, err.Error())
		},
	})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.proxies[agent] = proxy
	return proxy, nil
}

// setUp adds what the sandbox lacks, and stops what only some scenarios need.
func (s *environment) setUp(ctx context.Context) error {
	state := s.Sandbox.State()
	if err := s.journal.open(filepath.Join(state.Paths.Logs, "journal.log")); err != nil {
		return err
	}
	for i, address := range state.AgentAddresses {
		c, err := client.New(client.Options{
			Address: address,
			TLS:     &client.TLS{CertFile: state.Paths.AdminCertificate, KeyFile: state.Paths.AdminKey, CAFile: state.Paths.AgentCA},
			Timeout: attemptWithin, UserAgent: "chaos",
		})
		if err != nil {
			return err
		}
		s.clients[sandbox.AgentName(i)] = c
	}
	s.intent.update(func() { s.intent.spoke = s.Spoke })
	s.watched = watchAgents(ctx, s.clients)
	var err error
	s.auditor, err = invariants.Watch(ctx, s.Sandbox.HubConfig(), s.Hub, testenv.Scheme(), sandbox.ClusterNamespace, s.intent)
	if err != nil {
		return err
	}
	s.Checker.Expected = s.intent.expected
	// Only the scenarios with Karpenter run something on the machines.
	for _, component := range karpenter {
		if err := s.Sandbox.StopComponent(component); err != nil {
			return err
		}
	}
	return s.useAgents(ctx, 1)
}

// karpenter lists the components that only Karpenter needs.
var karpenter = []string{
	sandbox.Shim, sandbox.SpokeScheduler, sandbox.SpokeKwok, sandbox.SpokeControllerManager,
}

// useAgents runs the first n agents, and makes the holders call all of them.
func (s *environment) useAgents(ctx context.Context, n int) error {
	s.serving = n
	var called []*client.Client
	for i := range agents {
		name := sandbox.AgentName(i)
		if i >= n {
			if err := s.Sandbox.StopComponent(name); err != nil {
				return err
			}
			continue
		}
		if err := s.Sandbox.StartComponent(ctx, name); err != nil {
			return err
		}
		called = append(called, s.clients[name])
	}
	s.holders.use(called...)
	return nil
}

// kill kills a component as kill -9 does.
func (s *environment) kill(component string) error {
	s.mu.Lock()
	box := s.box
	s.mu.Unlock()
	if box == nil {
		return fmt.Errorf("%s is not started yet", component)
	}
	if err := box.Kill(component); err != nil {
		return err
	}
	s.kills.Add(1)
	s.journal.add("%s: KILLED", component)
	return nil
}

// awaitSuccessor returns once an agent that was just killed is ready again, or after a timeout.
func (s *environment) awaitSuccessor(agent string) {
	s.mu.Lock()
	box := s.box
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), restartWithin/2)
	defer cancel()
	_ = wait(ctx, 2*restartAfter) // until its death has been noticed
	_ = box.WaitReady(ctx, agent)
	_ = wait(ctx, between(0, time.Second))
}

// see records a write before it is sent on.
func (s *environment) see(agent string, r *faults.Request) {
	if r.Class == faults.Ignored {
		return
	}
	if r.Class == faults.MachineDeleted {
		if uid := uidIn(r.Body); uid != "" {
			s.intent.update(func() { s.intent.asked[uid] = true })
		}
	}
	s.journal.add("%s: %s %s %s %.1500s", agent, r.Class, r.Resource, r.Name, r.Body)
}

// plans sets the faults of the agents' requests, in addition to fail points. Nil means none.
func (s *environment) plans(plan func(agent string, r *faults.Request) faults.Fault) {
	if plan == nil {
		s.plan.Store(nil)
		return
	}
	s.plan.Store(&plan)
}

func (s *environment) strangeWrites() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.strange...)
}

func (s *environment) closeProxies() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.proxies {
		p.Close()
	}
}

// stop stops everything. The logs are kept.
func (s *environment) stop() {
	if s.watched != nil {
		s.watched.stop()
	}
	for _, c := range s.clients {
		_ = c.Close()
	}
	if s.auditor != nil {
		s.auditor.Stop()
	}
	s.Stop()
	s.closeProxies()
	s.journal.close()
}

// journal is a file with a line for each write and each fault. The zero value discards them.
type journal struct {
	mu   sync.Mutex
	file *os.File
}

func (j *journal) open(path string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	var err error
	j.file, err = os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	return err
}

func (j *journal) add(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file != nil {
		_, _ = fmt.Fprintf(j.file, time.Now().UTC().Format("15:04:05.000 ")+format+"\n", args...)
	}
}

func (j *journal) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file != nil {
		_ = j.file.Close()
		j.file = nil
	}
}
