package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/samber/lo"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// Get returns the claim as the API server has it, or [ErrNotFound]. A claim whose object was lost
// is recreated if a Machine carries its label. Other errors: [ErrUnknownCluster],
// [ErrClusterPaused], [ErrRestoring], or the API server's.
func (e *Engine) Get(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	c, err := e.find(ctx, key)
	if err != nil {
		return nil, err
	}
	return c, e.known(ctx, c)
}

// asCached returns a claim from the caches for the first attempt to write it. The write is refused
// if the claim has changed since. It returns nil if the caches do not show the claim, or show that
// there is nothing to write.
func (e *Engine) asCached(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	var c v1alpha1.MachineClaim
	err := e.Client.Get(ctx, key.object(), &c)
	if phase := c.CurrentPhase(); err == nil && (phase == v1alpha1.PhasePending || phase == v1alpha1.PhaseBound) {
		return &c, nil
	}
	return nil, client.IgnoreNotFound(err)
}

// find is [Engine.Get] for callers that do not depend on what the claim has.
func (e *Engine) find(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	c, err := e.getUncached(ctx, key)
	if !errors.Is(err, ErrNotFound) {
		return c, err
	}
	// Before, because the object may not have been there yet, and after, because it may be gone
	// already.
	cluster := types.NamespacedName{Namespace: key.Namespace, Name: key.Cluster}
	if _, err := e.UnpausedCluster(ctx, cluster); err != nil {
		return nil, err
	}
	if c, err := e.getUncached(ctx, key); !errors.Is(err, ErrNotFound) {
		return c, err
	}
	if _, err := e.UnpausedCluster(ctx, cluster); err != nil {
		return nil, err
	}
	return e.restoreFromLabel(ctx, key)
}

// known returns [ErrRestoring] if the claim was moved or restored without its status.
func (e *Engine) known(ctx context.Context, c *v1alpha1.MachineClaim) error {
	if c.CurrentPhase() != v1alpha1.PhasePending || c.Status.Phase != "" {
		return nil
	}
	cluster, err := e.cluster(ctx, c.Namespace, c.Spec.ClusterName)
	if err == nil && cluster != nil && protocol.Carried(c, cluster.UID) {
		err = ErrRestoring
	}
	return err
}

// UnpausedCluster returns the Cluster if it exists and is not paused. A caller that concludes from
// a missing object calls it before the read, as a move may not have created the object here yet,
// and after the read, as a move may have deleted it. Errors: [ErrUnknownCluster],
// [ErrClusterPaused], or the API server's.
func (e *Engine) UnpausedCluster(ctx context.Context, key types.NamespacedName) (*clusterv1.Cluster, error) {
	cluster, err := e.uncachedCluster(ctx, key)
	switch {
	case err != nil:
		return nil, err
	case cluster == nil:
		return nil, ErrUnknownCluster
	case eligibility.ClusterPaused(cluster):
		return nil, ErrClusterPaused
	}
	return cluster, nil
}

// uncachedCluster returns the Cluster as the API server has it, nil when there is none.
func (e *Engine) uncachedCluster(ctx context.Context, key types.NamespacedName) (*clusterv1.Cluster, error) {
	var cluster clusterv1.Cluster
	if err := e.Reader.Get(ctx, key, &cluster); apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // documented
	} else if err != nil {
		return nil, fmt.Errorf("reading Cluster %s: %w", key, err)
	}
	return &cluster, nil
}

// holderKey names a holder of claims of one Cluster.
type holderKey struct {
	cluster types.NamespacedName
	holder  string
}

// decided reports whether each of the claims was in, or was judged missing from, the last live set
// of its holder that this process received. Times cannot show that: the API server dates the
// objects that a restore creates, and an agent dates the live set, each by its own clock.
func (e *Engine) decided(cluster types.NamespacedName, claims []*v1alpha1.MachineClaim) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return !slices.ContainsFunc(claims, func(c *v1alpha1.MachineClaim) bool {
		return protocol.Reported(c) && !e.synced[holderKey{cluster, c.Spec.Holder}][c.UID]
	})
}

// getUncached returns the claim as the API server has it, or [ErrNotFound].
func (e *Engine) getUncached(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	var c v1alpha1.MachineClaim
	if err := e.Reader.Get(ctx, key.object(), &c); apierrors.IsNotFound(err) {
		return nil, ErrNotFound
	} else if err != nil {
		return nil, fmt.Errorf("reading the claim: %w", err)
	}
	return &c, nil
}

// ListOptions select claims.
type ListOptions struct {
	Namespace, Cluster string
	// Holder selects one holder's claims; empty means all.
	Holder string
	// IncludeEnded also selects ended claims that are still kept.
	IncludeEnded bool
}

// List returns the claims as the API server has them, oldest first, and, for one holder, a token
// for [Engine.Sync]. The result is complete and shows what each claim has, or an error is returned:
// [ErrUnknownCluster], [ErrClusterPaused], [ErrRestoring], or the API server's.
func (e *Engine) List(ctx context.Context, o ListOptions) ([]v1alpha1.MachineClaim, string, error) {
	begun := e.Clock.Now()
	key := types.NamespacedName{Namespace: o.Namespace, Name: o.Cluster}
	if _, err := e.UnpausedCluster(ctx, key); err != nil {
		return nil, "", err
	}
	owned, err := e.labelledIn(ctx, key) // before the claims: the status of claims that are labelled by then shows their Machine
	if err != nil {
		return nil, "", err
	}
	items, err := e.listUncached(ctx, o)
	if err != nil {
		return nil, "", fmt.Errorf("listing claims: %w", err)
	}
	cluster, err := e.UnpausedCluster(ctx, key)
	if err != nil {
		return nil, "", err
	}
	if err := e.knowsAll(ctx, cluster, o.Holder, items, owned); err != nil {
		return nil, "", err
	}
	items = slices.DeleteFunc(items, func(c v1alpha1.MachineClaim) bool {
		return c.Spec.ClusterName != o.Cluster || o.Holder != "" && c.Spec.Holder != o.Holder ||
			!o.IncludeEnded && c.CurrentPhase() == v1alpha1.PhaseEnded
	})
	slices.SortFunc(items, func(a, b v1alpha1.MachineClaim) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return cmp.Compare(a.Name, b.Name)
	})
	if o.Holder == "" {
		return items, "", nil
	}
	return items, newToken(o, begun, items).encode(), nil
}

// manyClaims is the number of claims from which a Cluster's list is not shared, because the other
// callers would wait for its transfer.
const manyClaims = 500

// sameLists are lists of claims that differ by the Cluster only.
type sameLists struct {
	namespace, holder string
	includeEnded      bool
}

// listUncached returns the claims as the API server has them, in any order. The cost of a list
// grows with the number of claims in the namespace, so Clusters of one namespace that wait at the
// same time share lists.
func (e *Engine) listUncached(ctx context.Context, o ListOptions) ([]v1alpha1.MachineClaim, error) {
	read := func(ctx context.Context, clusters []string) (map[string][]v1alpha1.MachineClaim, error) {
		same := labels.Set{}
		if o.Holder != "" {
			same[v1alpha1.HolderLabel] = o.Holder
		}
		if len(clusters) == 1 {
			same[v1alpha1.ClusterLabel] = clusters[0]
		}
		selector := labels.SelectorFromSet(same)
		if len(clusters) > 1 {
			among, err := labels.NewRequirement(v1alpha1.ClusterLabel, selection.In, clusters)
			if err != nil {
				return nil, err
			}
			selector = selector.Add(*among)
		}
		options := []client.ListOption{client.InNamespace(o.Namespace), client.MatchingLabelsSelector{Selector: selector}}
		if !o.IncludeEnded {
			options = e.withoutEnded(options)
		}
		var list v1alpha1.MachineClaimList
		if err := e.Reader.List(ctx, &list, options...); err != nil {
			return nil, err
		}
		return lo.GroupBy(list.Items, func(c v1alpha1.MachineClaim) string { return c.Labels[v1alpha1.ClusterLabel] }), nil
	}
	expected := manyClaims
	if err := e.withNumbers(ctx, types.NamespacedName{Namespace: o.Namespace, Name: o.Cluster}, func(n *numbers) {
		expected = n.census.live
		if o.IncludeEnded || e.NotEnded == nil {
			expected += n.census.ended
		}
	}); err != nil {
		return nil, err
	}
	if expected >= manyClaims || len(validation.IsValidLabelValue(o.Cluster)) > 0 { // such a value would make the others' list fail
		byCluster, err := read(ctx, []string{o.Cluster})
		return byCluster[o.Cluster], err
	}
	return e.lists.Do(ctx, sameLists{o.Namespace, o.Holder, o.IncludeEnded}, o.Cluster, read)
}

// labelledIn reads from the caches which claims the Cluster's Machines are labelled with. It
// returns the claims' holders by claim id. It leaves out Machines that are being deleted or belong
// to no MachineDeployment.
func (e *Engine) labelledIn(ctx context.Context, cluster types.NamespacedName) (map[string]string, error) {
	var machines clusterv1.MachineList
	err := e.Client.List(ctx, &machines, client.InNamespace(cluster.Namespace),
		selecting(e.Indexes.Cluster, clusterv1.ClusterNameLabel, cluster.Name), client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("listing the Cluster's Machines: %w", err)
	}
	owned := map[string]string{}
	for i := range machines.Items {
		m := &machines.Items[i]
		id := protocol.ClaimOf(m)
		if id != "" && protocol.Alive(m) && m.Spec.ClusterName == cluster.Name && m.Labels[clusterv1.MachineDeploymentNameLabel] != "" {
			owned[id] = m.Annotations[v1alpha1.ClaimHolderAnnotation]
		}
	}
	return owned, nil
}

// knowsAll returns [ErrRestoring] if a claim's Machine would be missing from the list, because the
// claim lost its status, or its object, which the node group's next step recreates. owned are the
// holders of claims that have Machines. mine is the holder whose claims are listed, "" for all.
func (e *Engine) knowsAll(
	ctx context.Context, cluster *clusterv1.Cluster, mine string, listed []v1alpha1.MachineClaim, owned map[string]string,
) error {
	restoring := func(id, group string) error {
		return fmt.Errorf("%w: claim %s of node group %s", ErrRestoring, id, group)
	}
	for i := range listed {
		c := &listed[i]
		id := c.Spec.ClaimID
		_, owns := owned[id]
		if protocol.Carried(c, cluster.UID) || owns && c.Status.Phase == "" {
			return restoring(id, c.Spec.NodeGroup)
		}
		delete(owned, id)
	}
	for id, holder := range owned {
		if mine != "" && holder != "" && holder != mine {
			continue
		}
		_, err := e.claimNamed(ctx, Key{Namespace: cluster.Namespace, Cluster: cluster.Name, ID: id})
		if errors.Is(err, ErrNotFound) {
			return restoring(id, "that its Machine belongs to")
		} else if err != nil {
			return err
		}
	}
	return nil
}

// withoutEnded adds the option that excludes ended claims to those of a list from the API server.
func (e *Engine) withoutEnded(options []client.ListOption) []client.ListOption {
	if e.NotEnded != nil {
		options = append(options, e.NotEnded)
	}
	return options
}

// cluster returns the Cluster, or nil when there is none. Only the API server decides that there is
// none (rule R3).
func (e *Engine) cluster(ctx context.Context, namespace, name string) (*clusterv1.Cluster, error) {
	var cluster clusterv1.Cluster
	found, err := e.get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &cluster)
	if err != nil || !found {
		return nil, err
	}
	return &cluster, nil
}

// paused reports whether the Cluster is paused. A Cluster that does not exist is not.
func (e *Engine) paused(ctx context.Context, key types.NamespacedName) (bool, error) {
	cluster, err := e.cluster(ctx, key.Namespace, key.Name)
	return cluster != nil && eligibility.ClusterPaused(cluster), err
}

// get reads an object from the cache, or from the API server if the cache does not have it. It
// reports whether it exists.
func (e *Engine) get(ctx context.Context, key types.NamespacedName, object client.Object) (bool, error) {
	err := e.Client.Get(ctx, key, object)
	if apierrors.IsNotFound(err) {
		err = e.Reader.Get(ctx, key, object)
	}
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading %T %s: %w", object, key, err)
	}
	return true, nil
}
