// Package disruptionqueue finishes commands of core's disruption whose first candidate is gone.
//
// Core's queue looks at a command each second, under the name of the NodeClaim of the first
// candidate. When that NodeClaim is gone, because its Machine was deleted for example,
// controller-runtime has nothing to look at, and forgets the command without an error. Its other
// Nodes would stay tainted, count against the budgets of their NodePool, and be disrupted no more,
// until Karpenter restarts. A machine that boots for minutes leaves that much time for this to
// happen.
package disruptionqueue

import (
	"context"
	"errors"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/operator"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/panics"
)

const (
	// look is how often the queue is looked at. It is core's own interval.
	look = time.Second
	// settled is how long the first candidate must have been gone. By then, core's controller has
	// noticed, so that two of them never work on one command.
	settled = 15 * time.Second
)

// Finisher finishes commands whose first candidate is gone. It is a runnable for the leader.
type Finisher struct {
	clock clock.PassiveClock
	kube  client.Reader
	queue *disruption.Queue

	// These are used by one goroutine. first is the first candidate of each command, as it was seen
	// first: core may replace the object later, without the lock. gone is since when it has been
	// gone.
	first map[*disruption.Command]*karpv1.NodeClaim
	gone  map[*disruption.Command]time.Time
}

// New returns a finisher. core are core's controllers; it is an error if its queue is not among
// them. kube reads NodeClaims from a cache.
func New(clk clock.PassiveClock, kube client.Reader, core []controller.Controller) (*Finisher, error) {
	queue, found := operator.Find[*disruption.Queue](core, (&disruption.Queue{}).Name())
	if !found {
		return nil, errors.New("core has no disruption.Queue among its controllers")
	}
	return &Finisher{clock: clk, kube: kube, queue: queue, gone: map[*disruption.Command]time.Time{}}, nil
}

// Start looks at the queue until the context ends.
func (f *Finisher) Start(ctx context.Context) error {
	wait.UntilWithContext(ctx, f.Look, look)
	return nil
}

// Look has core look at each command whose first candidate has been gone for a while. Core deletes
// the other candidates once the replacements are initialized, or gives the command up after ten
// minutes.
func (f *Finisher) Look(ctx context.Context) {
	left := map[*disruption.Command]time.Time{}
	f.first = f.commands()
	for command, first := range f.first {
		err := f.kube.Get(ctx, client.ObjectKeyFromObject(first), &karpv1.NodeClaim{})
		if !apierrors.IsNotFound(err) {
			continue // another error means nothing, and the next look is near
		}
		since, known := f.gone[command]
		if !known {
			since = f.clock.Now()
		}
		left[command] = since
		if f.clock.Since(since) < settled {
			continue
		}
		err = panics.Confined(func() error {
			_, err := f.queue.Reconcile(ctx, first)
			return err
		})
		if err != nil {
			log.FromContext(ctx).Error(err, "finishing a disruption whose first candidate is gone", "NodeClaim", first.Name)
		}
	}
	f.gone = left
}

// commands returns the first candidate's NodeClaim of each command in the queue.
func (f *Finisher) commands() map[*disruption.Command]*karpv1.NodeClaim {
	f.queue.RLock()
	defer f.queue.RUnlock()
	commands := map[*disruption.Command]*karpv1.NodeClaim{}
	for _, command := range f.queue.ProviderIDToCommand {
		if first, known := f.first[command]; known {
			commands[command] = first
		} else {
			commands[command] = command.Candidates[0].NodeClaim
		}
	}
	return commands
}
