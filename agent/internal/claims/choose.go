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
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

const (
	// maxCandidates is how many candidates a claim keeps: its present one and the next best. If all
	// of them are full or closed, a new call is better than a further candidate.
	maxCandidates = 16
	// maxLookups is how many candidates that are missing from the caches one call reads from the
	// API server. A node group that was made just now is among the first of them, and made-up names
	// cost no more than that.
	maxLookups = 4
)

// choice is the result of choosing among a list of candidates.
type choice struct {
	// candidates begins with the first candidate that would take a claim now, according to the
	// caches. The next best node groups of the Cluster follow, whether they would take it or not.
	// It is empty when none would.
	candidates []string
	// deployment is the MachineDeployment of the first one, as it was read; nil for none.
	deployment *clusterv1.MachineDeployment
	// refusals are the reasons why the candidates before the first would not take the claim.
	refusals []eligibility.Refusal
	// unseen is how many candidates are missing from the caches and were not read from the API
	// server. They are not assumed to be gone (rule R3).
	unseen int
}

func (c choice) none() bool { return len(c.candidates) == 0 }

// first returns the chosen candidate, "" for none.
func (c choice) first() string {
	if c.none() {
		return ""
	}
	return c.candidates[0]
}

// refused returns the error for a choice of none.
func (c choice) refused() error {
	err := refusedAll(c.refusals)
	if _, full := err.(*NoRoomError); c.unseen > 0 && !full { //nolint:errorlint // it was made just now
		return &UnseenError{Candidates: c.unseen}
	}
	return err
}

// choose finds the first of the candidates that would take the claim now, according to the caches.
func (e *Engine) choose(ctx context.Context, r Request, cluster *clusterv1.Cluster, candidates []string) (choice, error) {
	var chosen choice
	lookups := 0
	for _, name := range candidates {
		var md clusterv1.MachineDeployment
		key := types.NamespacedName{Namespace: r.Namespace, Name: name}
		err := e.Client.Get(ctx, key, &md)
		// Another Cluster's are treated like those that do not exist, so that the answer tells a
		// caller nothing about them.
		if missing := apierrors.IsNotFound(err) || err == nil && md.Spec.ClusterName != cluster.Name; missing {
			if !chosen.none() {
				continue // good enough for those that are only kept
			}
			if lookups == maxLookups {
				chosen.unseen++
				continue
			}
			lookups++
			md = clusterv1.MachineDeployment{} // decoding into another Cluster's object would keep what this one lacks
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

// refusalOrBug is [Engine.refusal], but reports a node group on which it panics as closed.
func (e *Engine) refusalOrBug(
	ctx context.Context, r Request, cluster *clusterv1.Cluster, md *clusterv1.MachineDeployment,
) (refusal *eligibility.Refusal, err error) {
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues("nodeGroup", md.Name))
	err = recovered(ctx, func() (err error) {
		refusal, err = e.refusal(ctx, r, cluster, md)
		return err
	})
	if _, panicked := errors.AsType[*panics.Error](err); panicked {
		return &eligibility.Refusal{
			NodeGroup: md.Name, Reason: eligibility.Invalid,
			Message: "an internal error of the agent, please report it: the agent's log has this node group's name and a stack trace",
		}, nil
	}
	return refusal, err
}

// unknownGroup returns the refusal of a name that no node group of the Cluster has.
func unknownGroup(name string) *eligibility.Refusal {
	return &eligibility.Refusal{NodeGroup: name, Reason: eligibility.Gone, Message: "no such node group in this Cluster"}
}

// maySpare reports whether a group may have a spare, according to its ledger and the cached claims.
// It does not read Machines, because for a full group among many candidates the answer is mostly
// no.
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
