package kubectl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes/scheme"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

const (
	// redrawEvery is how often the screen is redrawn, and how long changes of pods are counted
	// together.
	redrawEvery = 250 * time.Millisecond
	// changeTime is the layout of the times of changes.
	changeTime = "15:04:05.00"
)

// Sequences that control a terminal.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	home        = "\x1b[H"
	clearLine   = "\x1b[K"
	clearBelow  = "\x1b[J"
)

func topCommand(access *Access) *cobra.Command {
	return &cobra.Command{
		Use:   "top",
		Short: "Watch pods become nodes, live: on a terminal as a table, else as a line for each change",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if structured(access.Output) {
				return fmt.Errorf("top does not support the output %s: it shows changes", access.Output)
			}
			return access.top(cmd.Context(), cmd.OutOrStdout())
		},
	}
}

// top shows the board until the context is done.
func (a *Access) top(ctx context.Context, out io.Writer) error {
	agent, err := a.Agent(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = agent.Close() }()
	config, err := a.SpokeConfig()
	if err != nil {
		return err
	}
	config.Timeout = 0 // watches last
	watches := &watchErrors{}
	spoke, err := cache.New(config, cache.Options{
		Scheme: scheme.Scheme, Mapper: mapper(), DefaultTransform: cache.TransformStripManagedFields(), DefaultWatchErrorHandler: watches.note,
	})
	if err != nil {
		return spokeProblem(err, "watching the spoke")
	}
	running, stop := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer stop()

	shown := &shown{board: newBoard(time.Now), out: out}
	groups, claims := agent.MirrorNodeGroups(agent.Cluster), agent.MirrorClaims(agent.Cluster, v1alpha1.Holder)
	work.Go(func() { _ = spoke.Start(running) })
	for _, mirror := range []func(context.Context) error{groups.Run, claims.Run} {
		work.Go(func() { _ = mirror(running) })
	}
	width, _ := size(out)
	if shown.screen = width > 0; shown.screen {
		fmt.Fprint(out, enterScreen)
		defer fmt.Fprint(out, leaveScreen)
	}
	b := shown.board
	syncing, cancel := context.WithTimeout(running, a.Timeout)
	defer cancel()
	for _, watch := range []func() error{
		func() error { return watch(syncing, spoke, shown, &corev1.Node{}, b.seeNode, b.nodeGone) },
		func() error {
			return watch(syncing, spoke, shown, &karpv1.NodeClaim{}, b.seeNodeClaim, b.nodeClaimGone)
		},
		func() error { return watch(syncing, spoke, shown, &corev1.Pod{}, b.seePod, b.podGone) },
	} {
		if err := watch(); err != nil {
			return spokeProblem(cmp.Or(watches.recent(), err), "watching the spoke")
		}
	}
	work.Go(func() {
		follow(running, groups, shown, b.seeGroup, b.groupGone)
	})
	work.Go(func() {
		follow(running, claims, shown, b.seeClaim, b.claimGone)
	})
	ticker := time.NewTicker(redrawEvery)
	defer ticker.Stop()
	for {
		shown.tick(lost(groups.State(), claims.State()), watches.recent())
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// watchErrors are the errors of the watches of the spoke. It is safe for concurrent use.
type watchErrors struct {
	mu  sync.Mutex
	err error
	at  time.Time
}

// watchedAgain is how long a watch that fails may take to try again.
const watchedAgain = time.Minute

func (w *watchErrors) note(_ context.Context, _ *toolscache.Reflector, err error) {
	if errors.Is(err, io.EOF) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) { // watches end regularly
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	// The watches of several kinds fail in turn: one error for all of them.
	if w.err == nil || time.Since(w.at) > watchedAgain {
		w.err = err
	}
	w.at = time.Now()
}

// recent returns the error with which watches have failed lately, or nil.
func (w *watchErrors) recent() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.at) > watchedAgain {
		return nil
	}
	return w.err
}

// lost returns why a mirror is not connected, or "". Before the first attempt has ended, it is not
// known.
func lost(states ...agentclient.State) string {
	for _, state := range states {
		if !state.Connected && state.LastError != nil {
			return status.Convert(state.LastError).Message()
		}
	}
	return ""
}

// shown is a board on an output. It is safe for concurrent use.
type shown struct {
	out    io.Writer
	screen bool // redraw in place

	mu    sync.Mutex
	board *board
}

// see applies a change to the board.
func (s *shown) see(changes func() []change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(changes())
}

// write writes changes, unless the screen shows them. s.mu must be held.
func (s *shown) write(changes []change) {
	if s.screen {
		return
	}
	for _, c := range changes {
		fmt.Fprintf(s.out, "%s  %-9s  %s\n", s.board.now().Format(changeTime), c.kind, oneLine(strings.TrimSpace(c.name+"  "+c.what)))
	}
}

// tick shows what is shown regularly, and why the agent and the spoke are not watched.
func (s *shown) tick(agent string, spoke error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(s.board.seeAgent(agent))
	s.write(s.board.seeSpoke(spoke))
	s.write(s.board.podCounts())
	s.board.forget()
	if !s.screen {
		return
	}
	width, height := size(s.out)
	fmt.Fprint(s.out, home)
	lines := s.board.frame(width, height)
	for i, line := range lines {
		fmt.Fprint(s.out, line+clearLine)
		if i < len(lines)-1 {
			fmt.Fprint(s.out, "\r\n")
		}
	}
	fmt.Fprint(s.out, clearBelow)
}

// watch calls see for each object that appears or changes, and gone for each that disappears. It
// returns once the existing objects have been seen.
func watch[P client.Object](ctx context.Context, spoke cache.Cache, s *shown, kind P, see, gone func(P) []change) error {
	informer, err := spoke.GetInformer(ctx, kind)
	if err != nil {
		return err
	}
	on := func(f func(P) []change) func(any) {
		return func(object any) {
			if tombstone, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
				object = tombstone.Obj
			}
			if typed, ok := object.(P); ok {
				s.see(func() []change { return f(typed) })
			}
		}
	}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: on(see), UpdateFunc: func(_, object any) { on(see)(object) }, DeleteFunc: on(gone),
	})
	if err != nil {
		return err
	}
	if !toolscache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		return fmt.Errorf("%T: %w", kind, context.Cause(ctx))
	}
	return nil
}

// message is what a mirror holds.
type message interface {
	*agentv1alpha1.NodeGroup | *agentv1alpha1.Claim
}

// mirror is a mirror of the agent's objects.
type mirror[T message] interface {
	Get(key string) (T, bool)
	Subscribe() *agentclient.Subscription
}

// follow calls see for each object of a mirror that appears or changes, and gone for each that
// disappears, until the context is done.
func follow[T message](ctx context.Context, m mirror[T], s *shown, see func(T) []change, gone func(string) []change) {
	subscription := m.Subscribe()
	defer subscription.Close()
	for {
		select {
		case <-ctx.Done():
			return
		case <-subscription.Changed():
		}
		for _, key := range subscription.Take() {
			if object, has := m.Get(key); has {
				s.see(func() []change { return see(object) })
			} else {
				s.see(func() []change { return gone(key) })
			}
		}
	}
}
