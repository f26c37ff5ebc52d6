package claims

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	caches "github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
)

var errCrash = errors.New("the agent was killed")

// retention is how long the model's agents keep ended claims, and callersPatience how long a call
// may take. The first must be longer than the second.
const (
	retention       = 30 * time.Minute
	callersPatience = 20 * time.Minute
)

// process is one agent: an engine, and caches that lag behind independently for each kind.
type process struct {
	engine *Engine
	caches map[kind]objects
	// call is what the process is doing now; nil when it is idle. A busy process is not asked for
	// anything else.
	call *call
}

// call is one run of an agent, and what happens to it.
type call struct {
	// fault happens at the write that the countdown reaches. A gap, in which others act, happens
	// before the request that its own countdown reaches.
	fault  fault
	writes int
	gap    int
	// dead means that the process was killed. disturbed means that a request failed unnecessarily.
	dead, disturbed bool
	// begun is the number of the world's events when the call began.
	begun int
}

// fault is what the adversary does to one write of an agent.
type fault string

const (
	none        fault = "none"
	crashBefore fault = "killed before the write"
	crashAfter  fault = "killed after the write"
	crashLate   fault = "killed, and the write done later"
	refuse      fault = "write refused"
	loseReply   fault = "reply lost" // the write is done, but the agent gets an error
	delay       fault = "delayed"    // the agent gets an error, and the write is done later
)

func (w *world) newProcess(agent int) *process {
	p := &process{caches: map[kind]objects{}}
	for _, k := range allKinds {
		p.caches[k] = w.hub.snapshot(k)
	}
	p.engine = New(Config{
		ReportsNodes: func(string) bool { return true },
		Name:         fmt.Sprint("agent-", agent),
		Client:       &agentClient{w: w, p: p, cached: true}, Reader: &agentClient{w: w, p: p}, Clock: w.newClock(), Failure: w.failure,
		SpareGrace: time.Minute, TombstoneRetention: retention, Coalesce: time.Nanosecond,
		NotEnded: client.MatchingFieldsSelector{Selector: fields.OneTermNotEqualSelector("status.phase", string(v1alpha1.PhaseEnded))},
	})
	p.engine.spawn = func(run func()) { run() }
	p.engine.parallel = 1
	p.engine.ledgerBudget = w.ledgerBudget
	return p
}

// asAgent makes an idle agent do something. If it is killed on the way, a new process replaces it.
// It reports whether the call succeeded.
func (w *world) asAgent(e int, do func(context.Context, *Engine) error) bool {
	p := w.agents[e]
	if p.call != nil {
		return false
	}
	p.call = w.fate()
	err := do(context.Background(), p.engine)
	c := p.call
	p.call = nil
	if err != nil && w.dice != nil && strings.Contains(err.Error(), "panic: overrun") {
		w.dice.SkipNow() // the library ends a shorter history this way; the agent took it for its own panic
	}
	if c.dead {
		w.agents[e] = w.newProcess(e)
	} else if err != nil && !c.disturbed && !expected(err) && !w.mayAnswer(err) {
		w.t.Fatalf("I4: the agent gives up: %v", err)
	}
	w.check()
	return err == nil && !c.dead
}

// mayAnswer reports whether an undisturbed agent may return this error in this world.
func (w *world) mayAnswer(err error) bool {
	return w.moving && errors.Is(err, ErrUnknownCluster) || w.ledgerBudget != 0 && errors.Is(err, context.Canceled)
}

// expected reports whether an undisturbed agent may return this error.
func expected(err error) bool {
	var (
		noRoom  *NoRoomError
		ended   *EndedError
		refused *RefusedError
	)
	return errors.Is(err, ErrConflict) || errors.Is(err, ErrClusterPaused) || errors.Is(err, ErrRestoring) ||
		errors.As(err, &noRoom) || errors.As(err, &ended) || errors.As(err, &refused)
}

// fate draws what happens to a call.
func (w *world) fate() *call {
	c := &call{fault: none, writes: -1, gap: -1, begun: w.events}
	if w.fair {
		return c
	}
	c.fault = rapid.SampledFrom([]fault{none, none, none, none, crashBefore, crashAfter, refuse, loseReply, delay}).Draw(w.dice, "fault")
	if c.fault != none {
		c.writes = rapid.IntRange(0, 5).Draw(w.dice, "at write")
	}
	if w.depth < 2 {
		c.gap = rapid.IntRange(-6, 12).Draw(w.dice, "gap")
	}
	return c
}

// agentClient is an agent's connection to the hub: cached or live.
type agentClient struct {
	client.Client // for what no agent calls: it is nil

	w      *world
	p      *process
	cached bool
}

// request is the start of every request: others may act before it is served, and a dead process
// sends none.
func (a *agentClient) request() error {
	c := a.p.call
	if c.gap == 0 && !c.dead {
		c.gap = -1
		a.w.interleave()
	}
	c.gap--
	if c.dead {
		return errCrash
	}
	return nil
}

func (a *agentClient) from(k kind) objects {
	if a.cached {
		return a.p.caches[k]
	}
	return a.w.hub.objects[k]
}

func (a *agentClient) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	if err := a.request(); err != nil {
		return err
	}
	k := kindOf(into)
	o, found := a.from(k)[key.Name]
	if !found {
		return apierrors.NewNotFound(k.resource(), key.Name)
	}
	assign(into, o)
	return a.slim(into)
}

// slim reduces a copy from a cache to what the agent's caches keep of an object.
func (a *agentClient) slim(o runtime.Object) error {
	if !a.cached {
		return nil
	}
	_, err := caches.Slim(o)
	return err
}

func (a *agentClient) List(_ context.Context, into client.ObjectList, options ...client.ListOption) error {
	if err := a.request(); err != nil {
		return err
	}
	var o client.ListOptions
	o.ApplyOptions(options)
	fill(into, list(a.from(kindOfList(into)), &o))
	return meta.EachListItem(into, a.slim)
}

// write sends a write and applies its fate to it.
func (a *agentClient) write(do func() error) error {
	if err := a.request(); err != nil {
		return err
	}
	w, c := a.w, a.p.call
	checked := func() error {
		if w.withdrawing {
			return do()
		}
		before := w.look()
		err := do()
		switch {
		case err != nil:
		case w.moving:
			w.checkStill(before)
		default:
			w.checkWrite(c.begun, before)
		}
		return err
	}
	at := c.writes
	c.writes--
	faulty := none
	if w.chosen != nil {
		faulty = w.chosen()
	} else if at == 0 {
		faulty = c.fault
	}
	timeout := apierrors.NewTimeoutError("the request timed out", 1)
	switch faulty {
	case crashBefore:
		c.dead = true
		return errCrash
	case crashAfter:
		_ = checked()
		c.dead = true
		return errCrash
	case crashLate:
		w.late = append(w.late, func() { _ = checked() })
		c.dead = true
		return errCrash
	case refuse:
		c.disturbed = true
		return apierrors.NewInternalError(errors.New("the adversary refuses"))
	case loseReply:
		_ = checked()
		c.disturbed = true
		return timeout
	case delay:
		w.late = append(w.late, func() { _ = checked() })
		c.disturbed = true
		return timeout
	case none:
	}
	return checked()
}

func (a *agentClient) Create(_ context.Context, o client.Object, _ ...client.CreateOption) error {
	return a.write(func() error { return a.w.hub.create(o) })
}

func (a *agentClient) Update(_ context.Context, o client.Object, _ ...client.UpdateOption) error {
	return a.write(func() error { return a.w.hub.update(o, false) })
}

func (a *agentClient) Patch(_ context.Context, o client.Object, p client.Patch, _ ...client.PatchOption) error {
	data, err := p.Data(o)
	if err != nil {
		return fmt.Errorf("encoding the patch: %w", err)
	}
	return a.write(func() error { return a.w.hub.patch(o, p.Type(), data) })
}

func (a *agentClient) Delete(_ context.Context, o client.Object, options ...client.DeleteOption) error {
	var d client.DeleteOptions
	d.ApplyOptions(options)
	return a.write(func() error {
		if a.w.withdrawing {
			return a.w.hub.remove(o, preconditionsOf(d))
		}
		switch target := o.(type) {
		case *clusterv1.Machine:
			a.w.checkDelete(target, preconditionsOf(d))
		case *v1alpha1.MachineClaim:
			a.w.checkForget(target, preconditionsOf(d))
		}
		return a.w.hub.remove(o, preconditionsOf(d))
	})
}

func (a *agentClient) Status() client.SubResourceWriter { return statusWriter{agent: a} }

type statusWriter struct {
	client.SubResourceWriter // for what no agent calls: it is nil

	agent *agentClient
}

func (s statusWriter) Update(_ context.Context, o client.Object, _ ...client.SubResourceUpdateOption) error {
	// Checks that every write of a status derives the conditions.
	c, is := o.(*v1alpha1.MachineClaim)
	if is && !equality.Semantic.DeepEqual(c.Status.Conditions, conditionsOf(c, metav1.NewTime(s.agent.p.engine.Clock.Now()))) {
		panic(fmt.Sprintf("the conditions of claim %s are not those of its status: %+v", c.Spec.ClaimID, c.Status))
	}
	return s.agent.write(func() error { return s.agent.w.hub.update(o, true) })
}

func preconditionsOf(d client.DeleteOptions) *metav1.Preconditions {
	if d.Preconditions == nil {
		return nil
	}
	return &metav1.Preconditions{UID: d.Preconditions.UID, ResourceVersion: d.Preconditions.ResourceVersion}
}
