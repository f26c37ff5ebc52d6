package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// view is the source that a snapshot is read from.
type view int

const (
	// cached is fast and may lag. It is good for finding out whether there is something to do, and
	// for nothing else.
	cached view = iota
	// uncached is the API server itself, read consistently.
	uncached
)

func (e *Engine) reader(from view) client.Reader {
	if from == cached {
		return e.Client
	}
	return e.Reader
}

// read takes a snapshot from the given view: the MachineDeployment first, then the rest (rule R1).
// It returns nil when the MachineDeployment does not exist.
func (e *Engine) read(ctx context.Context, from view, key types.NamespacedName) (*protocol.Snapshot, error) {
	var md clusterv1.MachineDeployment
	if err := e.reader(from).Get(ctx, key, &md); apierrors.IsNotFound(err) {
		e.unusableLedger(key, nil)
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("reading the MachineDeployment: %w", err)
	}
	if from == cached {
		return e.readAround(ctx, from, key, over(&md, e.written))
	}
	return e.readAround(ctx, from, key, &md)
}

// forever is longer than any agent runs.
const forever = 100 * 365 * 24 * time.Hour

// readAround reads the rest of a snapshot, after the MachineDeployment was read.
func (e *Engine) readAround(ctx context.Context, from view, key types.NamespacedName, md *clusterv1.MachineDeployment) (*protocol.Snapshot, error) {
	cluster, err := e.cluster(ctx, key.Namespace, md.Spec.ClusterName)
	if err != nil {
		return nil, err
	}
	s := &protocol.Snapshot{
		Deployment:   md,
		Now:          e.Clock.Now(),
		ReportsNodes: e.ReportsNodes,
		Nodes:        e.reportedNodes(types.NamespacedName{Namespace: key.Namespace, Name: md.Spec.ClusterName}),
		SpareGrace:   e.SpareGrace,
		Failure:      e.Failure,
		Started:      e.started,
		LedgerBudget: e.ledgerBudget,
	}
	if s.Ledger, err = protocol.LedgerOf(md); errors.Is(err, protocol.ErrNewerLedger) {
		return nil, fmt.Errorf("MachineDeployment %s: %w", key, err)
	} else if e.unusableLedger(key, err) {
		log.FromContext(ctx).Error(err, "the ledger cannot be used; it is treated as missing", "machineDeployment", key)
	}
	if err := e.readParts(ctx, from, key, s); err != nil {
		return nil, err
	}
	// Machines vanish while a Cluster is moved, after it was paused. Before anything is concluded
	// from a missing one, read from the API server whether the Cluster is paused.
	if from == uncached && cluster != nil &&
		!eligibility.ClusterPaused(cluster) && (s.Lacks() || slices.ContainsFunc(s.Claims, ofAnotherLife(cluster))) {
		if cluster, err = e.uncachedCluster(ctx, types.NamespacedName{Namespace: key.Namespace, Name: md.Spec.ClusterName}); err != nil {
			return nil, err
		}
	}
	e.readReports(ctx, s)
	s.Group = eligibility.Of(md, cluster)
	if e.withdraws {
		// Nothing is ordered any more, no spare is removed, and no failed Machine is kept for
		// debugging.
		s.Group.KeepFailed, s.SpareGrace = 0, forever
		s.Group.Min, s.Group.Max = min(s.Group.Min, s.Group.Replicas), new(s.Group.Replicas)
	}
	if cluster != nil {
		s.ClusterUID = cluster.UID
		s.Synced = e.decided(client.ObjectKeyFromObject(cluster), s.Claims)
	} else {
		s.Lost = nil // without their Cluster, no claims can be made again
	}
	if s.MadeAgain() {
		log.FromContext(ctx).Info("the MachineDeployment was recreated with its predecessor's ledger; rebuilding the ledger", "machineDeployment", key)
		s.Ledger = nil
	}
	cooling, err := e.CoolingDown(ctx, key)
	if err != nil {
		return nil, err
	}
	s.Group = s.Group.With(cooling)
	if err := e.readQuota(ctx, s); err != nil {
		return nil, err
	}
	return s, nil
}

// unusableLedger records why a ledger cannot be used, nil if it can or if its MachineDeployment is
// gone. It reports whether there is a reason that it did not have at the last look. Such a ledger
// was made invalid by hand, or copied with a MachineDeployment. Without the label of node groups,
// the copy keeps it.
func (e *Engine) unusableLedger(key types.NamespacedName, why error) (isNew bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if why == nil {
		delete(e.unusable, key)
		return false
	}
	isNew = e.unusable[key] != why.Error()
	e.unusable[key] = why.Error()
	return isNew
}

// readQuota reads whether a quota is why waiting claims get no Machine.
func (e *Engine) readQuota(ctx context.Context, s *protocol.Snapshot) error {
	waits := func(c *v1alpha1.MachineClaim) bool { return c.CurrentPhase() == v1alpha1.PhasePending }
	if e.NoMachines == nil || !slices.ContainsFunc(s.Claims, waits) {
		return nil
	}
	refusal, err := e.NoMachines(ctx, s.Deployment)
	if err != nil {
		return err
	}
	if refusal != nil && refusal.Reason == eligibility.QuotaExceeded {
		s.Quota = refusal.Message
	}
	return nil
}

// readReports reads the conditions of infrastructure objects for Machines whose own conditions are
// not specific enough.
func (e *Engine) readReports(ctx context.Context, s *protocol.Snapshot) {
	if e.Report == nil {
		return
	}
	for _, m := range s.Machines {
		condition := e.Failure.See(m)
		if condition == "" {
			continue
		}
		report, known := e.Report(ctx, m, condition)
		if !known {
			continue
		}
		if s.Reports == nil {
			s.Reports = map[types.UID]protocol.Report{}
		}
		s.Reports[m.UID] = report
	}
}

// ofAnotherLife returns a function that reports whether a claim was made for the Cluster as it was
// before a move or a restore.
func ofAnotherLife(cluster *clusterv1.Cluster) func(*v1alpha1.MachineClaim) bool {
	return func(c *v1alpha1.MachineClaim) bool { return protocol.Carried(c, cluster.UID) }
}

func (e *Engine) readParts(ctx context.Context, from view, key types.NamespacedName, s *protocol.Snapshot) error {
	options := e.ofGroup(from, v1alpha1.NodeGroupLabel, key)
	if from == uncached {
		options = e.withoutEnded(options)
	}
	var claims v1alpha1.MachineClaimList
	if err := e.reader(from).List(ctx, &claims, options...); err != nil {
		return fmt.Errorf("listing claims: %w", err)
	}
	for i := range claims.Items {
		c := &claims.Items[i]
		if from == cached {
			c = over(c, e.written)
		}
		switch {
		case c.Spec.NodeGroup != key.Name, c.CurrentPhase() == v1alpha1.PhaseEnded:
		case s.Deployment.Spec.ClusterName != "" && c.Spec.ClusterName != s.Deployment.Spec.ClusterName:
			s.Foreign = append(s.Foreign, c) // the name was used before, for another Cluster
		default:
			s.Claims = append(s.Claims, c)
		}
	}
	members := e.ofGroup(from, clusterv1.MachineDeploymentNameLabel, key)
	// Read before the Machines, so that these include all that a paused MachineSet has made. Read
	// even without a ledger, because a pause of ours may outlive it.
	var sets clusterv1.MachineSetList
	if err := e.reader(from).List(ctx, &sets, members...); err != nil {
		return fmt.Errorf("listing MachineSets: %w", err)
	}
	ofAnother := func(clusterName string) bool { // of a former MachineDeployment of this name
		return s.Deployment.Spec.ClusterName != "" && clusterName != s.Deployment.Spec.ClusterName
	}
	for i := range sets.Items {
		if !ofAnother(sets.Items[i].Spec.ClusterName) {
			s.Sets = append(s.Sets, &sets.Items[i])
		}
	}
	var machines clusterv1.MachineList
	if err := e.reader(from).List(ctx, &machines, members...); err != nil {
		return fmt.Errorf("listing Machines: %w", err)
	}
	for i := range machines.Items {
		m := &machines.Items[i]
		if from == cached {
			m = over(m, e.written)
		}
		if !ofAnother(m.Spec.ClusterName) {
			s.Machines = append(s.Machines, m)
		}
	}
	return e.readStrays(ctx, key, s)
}

// ofGroup returns the options for listing what belongs to a node group. Objects from a cache are
// not copied and must not be changed.
func (e *Engine) ofGroup(from view, label string, key types.NamespacedName) []client.ListOption {
	options := []client.ListOption{client.InNamespace(key.Namespace), e.inGroup(from, label, key.Name)}
	if from == cached {
		options = append(options, client.UnsafeDisableDeepCopy)
	}
	return options
}

// inGroup selects what belongs to a node group: from the caches by index, from the API server by
// label.
func (e *Engine) inGroup(from view, label, name string) client.ListOption {
	if from == cached {
		return selecting(e.Indexes.Group, label, name)
	}
	return client.MatchingLabels{label: name}
}

// readStrays reads what the lists leave out, before anything is concluded from its absence (rule
// R3): claims that Machines are labelled with and that have ended or belong to another group, and
// Machines of claims that left the group.
func (e *Engine) readStrays(ctx context.Context, key types.NamespacedName, s *protocol.Snapshot) error {
	known := make(map[string]bool, len(s.Claims))
	for _, c := range s.Claims {
		known[c.Spec.ClaimID] = true
	}
	for _, m := range s.Machines {
		id := protocol.ClaimOf(m)
		if id == "" || known[id] {
			continue
		}
		c, err := e.claimNamed(ctx, Key{Namespace: key.Namespace, Cluster: m.Spec.ClusterName, ID: id})
		switch {
		case errors.Is(err, ErrNotFound):
			if s.Lost == nil {
				s.Lost = map[string]*clusterv1.Machine{}
			}
			s.Lost[id] = m
		case err != nil:
			return err
		case c.Spec.NodeGroup == key.Name || c.CurrentPhase() == v1alpha1.PhaseEnded:
			s.Claims = append(s.Claims, c) // its label was edited, or it is a tombstone
			known[id] = true
		}
	}
	if s.Ledger != nil {
		for id := range s.Ledger.Pending {
			if known[id] {
				continue
			}
			c, err := e.claimNamed(ctx, Key{Namespace: key.Namespace, Cluster: s.Deployment.Spec.ClusterName, ID: id})
			if err == nil && c.Spec.NodeGroup == key.Name && c.CurrentPhase() != v1alpha1.PhaseEnded {
				s.Claims = append(s.Claims, c) // its label was edited
			} else if err != nil && !errors.Is(err, ErrNotFound) {
				return err
			}
		}
	}
	var err error
	if s.Machines, err = e.readUnlisted(ctx, key, s.Claims, s.Machines); err != nil {
		return err
	}
	s.Strays, err = e.readUnlisted(ctx, key, s.Foreign, nil)
	return err
}

// readUnlisted adds to the listed Machines those that claims have according to their status.
func (e *Engine) readUnlisted(
	ctx context.Context, key types.NamespacedName, claims []*v1alpha1.MachineClaim, listed []*clusterv1.Machine,
) ([]*clusterv1.Machine, error) {
	known := make(map[types.UID]bool, len(listed))
	for _, m := range listed {
		known[m.UID] = true
	}
	for _, c := range claims {
		ref := c.Status.Machine
		if ref == nil || c.Status.Phase == v1alpha1.PhaseEnded || known[ref.UID] {
			continue
		}
		var m clusterv1.Machine
		err := e.Reader.Get(ctx, types.NamespacedName{Namespace: key.Namespace, Name: ref.Name}, &m)
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("reading Machine %s: %w", ref.Name, err)
		}
		if err == nil && m.UID == ref.UID {
			listed = append(listed, &m)
		}
	}
	return listed, nil
}

// claimNamed returns a claim from the cache if it has ended there, because that is final, else from
// the API server.
func (e *Engine) claimNamed(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	var c v1alpha1.MachineClaim
	if err := e.Client.Get(ctx, key.object(), &c); err == nil && c.Status.Phase == v1alpha1.PhaseEnded {
		return &c, nil
	}
	return e.getUncached(ctx, key)
}

// sameLedger reads from the API server whether the MachineDeployment and its ledger are still the
// ones that were read. The absence of a ledger counts as a ledger.
func (e *Engine) sameLedger(ctx context.Context, read *clusterv1.MachineDeployment) (bool, error) {
	var md clusterv1.MachineDeployment
	if err := e.Reader.Get(ctx, client.ObjectKeyFromObject(read), &md); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("reading the ledger: %w", err)
	} else if err == nil && md.UID != read.UID {
		return false, nil
	}
	return md.Annotations[v1alpha1.LedgerAnnotation] == read.Annotations[v1alpha1.LedgerAnnotation], nil
}
