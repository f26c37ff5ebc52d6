package claims

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

const (
	// maxCandidates is how many candidates a claim keeps: the one that it is at, and the next best. All of them are full or closed
	// before the claim could use a further one, and its call is better made anew then.
	maxCandidates = 16
	// maxLookups is how many candidates that the caches do not show are asked for at the API server in one call. A node group that
	// was made just now is among the first of them, and names that were made up cost no more than that.
	maxLookups = 4
)

// choice is what became of a list of candidates.
type choice struct {
	// candidates begin with the first that would take a claim now, as far as the caches tell; after it come the next best ones that
	// are node groups of the Cluster, whether they would or not. Empty when none would.
	candidates []string
	// deployment is the first one's MachineDeployment, as it was read; nil for none.
	deployment *clusterv1.MachineDeployment
	// refusals say why those before the first would not.
	refusals []eligibility.Refusal
	// unseen is how many candidates the caches do not show and the API server was not asked for. Nothing is concluded from that (rule
	// R3): they are not taken for gone.
	unseen int
}

func (c choice) none() bool { return len(c.candidates) == 0 }

// first is the candidate that was chosen, "" for none.
func (c choice) first() string {
	if c.none() {
		return ""
	}
	return c.candidates[0]
}

// refused is the error of a choice of none.
func (c choice) refused() error {
	err := refusedAll(c.refusals)
	if _, full := err.(*NoRoomError); c.unseen > 0 && !full { //nolint:errorlint // it was made just now
		return &UnseenError{Candidates: c.unseen}
	}
	return err
}

// choose finds the first of the candidates that would take the claim now, as far as the caches tell.
func (e *Engine) choose(ctx context.Context, r Request, cluster *clusterv1.Cluster, candidates []string) (choice, error) {
	var chosen choice
	lookups := 0
	for _, name := range candidates {
		var md clusterv1.MachineDeployment
		key := types.NamespacedName{Namespace: r.Namespace, Name: name}
		err := e.Client.Get(ctx, key, &md)
		if apierrors.IsNotFound(err) && !chosen.none() {
			continue // good enough for those that are only kept
		}
		if apierrors.IsNotFound(err) && lookups == maxLookups {
			chosen.unseen++
			continue
		}
		if apierrors.IsNotFound(err) {
			lookups++
			err = e.Reader.Get(ctx, key, &md)
		}
		switch {
		case err != nil && !apierrors.IsNotFound(err):
			return choice{}, fmt.Errorf("reading MachineDeployment %s: %w", key, err)
		case err != nil || md.Spec.ClusterName != cluster.Name:
			if chosen.none() {
				chosen.refusals = append(chosen.refusals, *unknownGroup(name))
			}
			continue
		case chosen.none():
			newest := over(&md, e.written)
			refusal, err := e.refusalOrBug(ctx, r, cluster, newest)
			if err != nil {
				return choice{}, err
			}
			if refusal != nil {
				chosen.refusals = append(chosen.refusals, *refusal)
				continue
			}
			chosen.deployment = newest
		}
		if chosen.candidates = append(chosen.candidates, name); len(chosen.candidates) == maxCandidates {
			break
		}
	}
	return chosen, nil
}

// refusalOrBug is [Engine.refusal], and takes a node group on which it panics for closed.
func (e *Engine) refusalOrBug(
	ctx context.Context, r Request, cluster *clusterv1.Cluster, md *clusterv1.MachineDeployment,
) (refusal *eligibility.Refusal, err error) {
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues("nodeGroup", md.Name))
	err = recovered(ctx, func() (err error) {
		refusal, err = e.refusal(ctx, r, cluster, md)
		return err
	})
	if _, panicked := errors.AsType[*panicError](err); panicked {
		return &eligibility.Refusal{
			NodeGroup: md.Name, Reason: eligibility.Invalid, Message: "a bug of the agent: the agent's log has this node group's name and a stack",
		}, nil
	}
	return refusal, err
}

// unknownGroup is the refusal of a name that no node group of the Cluster has.
func unknownGroup(name string) *eligibility.Refusal {
	return &eligibility.Refusal{NodeGroup: name, Reason: eligibility.Gone, Message: "no such node group in this Cluster"}
}

// maySpare reports whether a group may have a Machine that nobody has, as far as its ledger and the cached claims tell. It looks at
// no Machines: for a full group among many candidates the answer is mostly no.
func (e *Engine) maySpare(ctx context.Context, key types.NamespacedName, l *protocol.Ledger, group eligibility.Group) (bool, error) {
	var list v1alpha1.MachineClaimList
	if err := e.Client.List(ctx, &list, e.ofGroup(cached, v1alpha1.NodeGroupLabel, key)...); err != nil {
		return false, fmt.Errorf("listing claims: %w", err)
	}
	taken := int(l.Floor) + len(l.Releasing)
	for i := range list.Items {
		switch c := &list.Items[i]; c.CurrentPhase() {
		case v1alpha1.PhasePending, v1alpha1.PhaseBound:
			if c.Spec.NodeGroup == key.Name {
				taken++
			}
		case v1alpha1.PhaseReleasing, v1alpha1.PhaseEnded: // may hand its Machine over
		}
	}
	return int(group.Replicas) > taken, nil
}
