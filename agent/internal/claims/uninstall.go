package claims

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// closedLedger replaces the ledger while a node group is withdrawn. Agents treat it as a newer
// agent's ledger and leave the group alone.
const closedLedger = `{"v":2147483647,"closed":"by capi-agent uninstall"}`

// uninstallInterval is how often a node group is checked while Cluster API has to finish something
// for it.
const uninstallInterval = time.Second

// refusedFor is how long a write that is forbidden is repeated: the API servers need a few seconds
// until they no longer apply the policies whose bindings were deleted right before.
const refusedFor = 15 * time.Second

// UninstallOptions qualify [Engine.Uninstall].
type UninstallOptions struct {
	// Serves selects the Clusters to withdraw. Nil means all.
	Serves func(types.NamespacedName) bool
	// DryRun reports what would be removed, and removes nothing.
	DryRun bool
	// Force does not wait for releases that are in progress: their Machines lose the finalizer as
	// they are, so Cluster API may replace them.
	Force bool
	// Report receives a line for users about each thing that is done or waited for. Nil means none.
	Report func(format string, arguments ...any)
}

// Uninstall removes everything that agents ever wrote to the hub: ledgers, marks, finalizers and
// hooks, and MachineClaims. Releases in progress are finished first, which requires Cluster API to
// run. All other Machines stay and become the user's, spares too; none is ordered. Running agents
// leave a node group alone while it is withdrawn, but make new ledgers for new claims, so stop them
// first. Uninstall can be repeated, and continues where it stopped.
func (e *Engine) Uninstall(ctx context.Context, o UninstallOptions) error {
	if o.Report == nil {
		o.Report = func(string, ...any) {}
	}
	if o.Serves == nil {
		o.Serves = func(types.NamespacedName) bool { return true }
	}
	e.withdraws = true
	groups, err := e.touchedGroups(ctx, o)
	if err != nil {
		return err
	}
	if !o.DryRun {
		if err := e.withdrawAll(ctx, groups, o); err != nil {
			return err
		}
		return e.deleteClaims(ctx, o)
	}
	for _, key := range groups {
		o.Report("MachineDeployment %s: would be withdrawn", key)
	}
	return e.deleteClaims(ctx, o)
}

// withdrawAll withdraws the node groups. A group that cannot be withdrawn keeps no other one from
// it.
func (e *Engine) withdrawAll(ctx context.Context, groups []types.NamespacedName, o UninstallOptions) error {
	var failed []error
	said, last := map[types.NamespacedName]string{}, map[types.NamespacedName]error{}
	began := e.Clock.Now()
	for {
		for _, key := range slices.Clone(groups) {
			waiting, err := e.withdraw(ctx, key, o.Force)
			last[key] = err
			switch {
			case errors.Is(err, ErrConflict) || apierrors.IsConflict(err) || err != nil && ctx.Err() != nil:
				continue
			case apierrors.IsForbidden(err) && e.Clock.Since(began) < refusedFor:
				if said[key] == "" {
					said[key] = err.Error()
					o.Report("MachineDeployment %s: refused, and repeated until %s after the start: %v", key, refusedFor, err)
				}
				continue
			case err != nil:
				failed = append(failed, fmt.Errorf("MachineDeployment %s: %w", key, err))
			case waiting != "":
				if said[key] != waiting {
					o.Report("MachineDeployment %s: %s", key, waiting)
					said[key] = waiting
				}
				continue
			default:
				o.Report("MachineDeployment %s: withdrawn", key)
			}
			groups = slices.DeleteFunc(groups, func(k types.NamespacedName) bool { return k == key })
		}
		if len(groups) == 0 {
			return errors.Join(failed...)
		}
		select {
		case <-ctx.Done():
			why := cmp.Or(last[groups[0]], ctx.Err())
			return errors.Join(append(failed, fmt.Errorf("%d node groups are not withdrawn yet, for example %s; repeat, or give --force: %w",
				len(groups), groups[0], why))...)
		case <-e.Clock.After(uninstallInterval):
		}
	}
}

// touchedGroups returns the MachineDeployments that carry anything of the agent's, themselves or on
// their MachineSets or Machines.
func (e *Engine) touchedGroups(ctx context.Context, o UninstallOptions) ([]types.NamespacedName, error) {
	touched := map[types.NamespacedName]bool{}
	var deployments clusterv1.MachineDeploymentList
	if err := e.Reader.List(ctx, &deployments); err != nil {
		return nil, fmt.Errorf("listing MachineDeployments: %w", err)
	}
	for i := range deployments.Items {
		md := &deployments.Items[i]
		_, ledger := md.Annotations[v1alpha1.LedgerAnnotation]
		_, frozen := md.Annotations[v1alpha1.ReplicasLoweredAnnotation]
		if (ledger || frozen || pausedByAgent(md)) && o.Serves(types.NamespacedName{Namespace: md.Namespace, Name: md.Spec.ClusterName}) {
			touched[client.ObjectKeyFromObject(md)] = true
		}
	}
	add := func(object client.Object, clusterName string, ours bool) {
		group := object.GetLabels()[clusterv1.MachineDeploymentNameLabel]
		if ours && group != "" && o.Serves(types.NamespacedName{Namespace: object.GetNamespace(), Name: clusterName}) {
			touched[types.NamespacedName{Namespace: object.GetNamespace(), Name: group}] = true
		}
	}
	var sets clusterv1.MachineSetList
	if err := e.Reader.List(ctx, &sets); err != nil {
		return nil, fmt.Errorf("listing MachineSets: %w", err)
	}
	for i := range sets.Items {
		set := &sets.Items[i]
		add(set, set.Spec.ClusterName, cleaned(set) != nil)
	}
	var machines clusterv1.MachineList
	if err := e.Reader.List(ctx, &machines); err != nil {
		return nil, fmt.Errorf("listing Machines: %w", err)
	}
	for i := range machines.Items {
		m := &machines.Items[i]
		add(m, m.Spec.ClusterName, cleaned(m) != nil)
	}
	keys := slices.Collect(maps.Keys(touched))
	slices.SortFunc(keys, func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) })
	return keys, nil
}

// withdraw removes the agent from one node group: it finishes the releases, closes the ledger, and
// removes every mark and, last, the ledger. It returns what it waits for, "" when it is done.
func (e *Engine) withdraw(ctx context.Context, key types.NamespacedName, force bool) (waiting string, err error) {
	var md clusterv1.MachineDeployment
	if err := e.Reader.Get(ctx, key, &md); apierrors.IsNotFound(err) {
		return "", e.clean(ctx, key)
	} else if err != nil {
		return "", fmt.Errorf("reading the MachineDeployment: %w", err)
	}
	text, begun := md.Annotations[v1alpha1.LedgerAnnotation]
	if begun && text != closedLedger {
		if _, err := e.group(key.Namespace, key.Name).run(ctx); err != nil && !force {
			return "", err
		}
		s, err := e.read(ctx, uncached, key)
		switch {
		case err != nil && !force:
			return "", err
		case err == nil && s == nil:
			return "", e.clean(ctx, key)
		case err == nil:
			if waiting := underWay(s); waiting != "" && !force {
				return waiting, nil
			}
			text, begun = s.Deployment.Annotations[v1alpha1.LedgerAnnotation]
		}
		if begun {
			if err := e.closeLedger(ctx, key, text); err != nil {
				return "", err
			}
		}
	}
	if err := e.clean(ctx, key); err != nil {
		return "", err
	}
	return "", e.openLedger(ctx, key)
}

// underWay returns what Cluster API still has to do for releases of this group, "" when there is
// nothing.
func underWay(s *protocol.Snapshot) string {
	n := 0
	for _, c := range s.Claims {
		if c.CurrentPhase() == v1alpha1.PhaseReleasing {
			n++
		}
	}
	if s.Ledger != nil {
		n = max(n, len(s.Ledger.Releasing))
	}
	switch {
	case n > 0:
		return fmt.Sprintf("claims that are still being released: %d", n)
	case pausedByAgent(s.Deployment), slices.ContainsFunc(s.Sets, func(set *clusterv1.MachineSet) bool { return pausedByAgent(set) }):
		return "waiting for Cluster API to observe a pause"
	}
	return ""
}

func (e *Engine) closeLedger(ctx context.Context, key types.NamespacedName, text string) error {
	return e.patchAnnotations(ctx, key, []operation{
		test(annotationPath(v1alpha1.LedgerAnnotation), text), put(annotationPath(v1alpha1.LedgerAnnotation), closedLedger),
	})
}

// openLedger removes what is left on the group's MachineDeployment: the closed ledger, a pause of
// ours, and the annotations beside the ledger.
func (e *Engine) openLedger(ctx context.Context, key types.NamespacedName) error {
	var md clusterv1.MachineDeployment
	if err := e.Reader.Get(ctx, key, &md); err != nil {
		return client.IgnoreNotFound(err)
	}
	var operations []operation
	for annotation, value := range map[string]string{
		v1alpha1.LedgerAnnotation: closedLedger, clusterv1.PausedAnnotation: v1alpha1.PausedByAgent,
	} {
		if md.Annotations[annotation] == value {
			operations = append(operations, test(annotationPath(annotation), value), operation{Op: "remove", Path: annotationPath(annotation)})
		}
	}
	for _, annotation := range []string{v1alpha1.ReplicasLoweredAnnotation, v1alpha1.ClaimedAnnotation} {
		if _, present := md.Annotations[annotation]; present {
			operations = append(operations, operation{Op: "remove", Path: annotationPath(annotation)})
		}
	}
	if len(operations) == 0 {
		return nil
	}
	return e.patchAnnotations(ctx, key, operations)
}

func (e *Engine) patchAnnotations(ctx context.Context, key types.NamespacedName, operations []operation) error {
	patch, err := json.Marshal(operations)
	if err != nil {
		return fmt.Errorf("encoding a patch: %w", err)
	}
	md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
	if err := e.Client.Patch(ctx, md, client.RawPatch(types.JSONPatchType, patch), fieldOwner); err != nil {
		if testFailed(err) || apierrors.IsNotFound(err) {
			return fmt.Errorf("withdrawing: %w: %w", ErrConflict, err)
		}
		return fmt.Errorf("withdrawing: %w", err)
	}
	return nil
}

// clean removes every mark from the group's MachineSets and Machines.
func (e *Engine) clean(ctx context.Context, key types.NamespacedName) error {
	ofGroup := []client.ListOption{client.InNamespace(key.Namespace), client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: key.Name}}
	var sets clusterv1.MachineSetList
	if err := e.Reader.List(ctx, &sets, ofGroup...); err != nil {
		return fmt.Errorf("listing MachineSets: %w", err)
	}
	for i := range sets.Items {
		if after := cleaned(&sets.Items[i]); after != nil {
			if err := e.patchSet(ctx, &sets.Items[i], after); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("cleaning MachineSet %s: %w", after.Name, err)
			}
		}
	}
	var machines clusterv1.MachineList
	if err := e.Reader.List(ctx, &machines, ofGroup...); err != nil {
		return fmt.Errorf("listing Machines: %w", err)
	}
	for i := range machines.Items {
		if after := cleaned(&machines.Items[i]); after != nil {
			if err := e.patchMachine(ctx, &machines.Items[i], after); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("cleaning Machine %s: %w", after.Name, err)
			}
		}
	}
	return nil
}

// cleaned returns a copy of the object without anything of the agent's, or nil if there is nothing
// to remove.
func cleaned[T interface {
	client.Object
	DeepCopy() T
}](object T) T {
	after := object.DeepCopy()
	labels, annotations := after.GetLabels(), after.GetAnnotations()
	before := len(labels) + len(annotations) + len(after.GetFinalizers())
	for _, key := range []string{v1alpha1.ClaimLabel, v1alpha1.ClaimNameLabel} {
		delete(labels, key)
	}
	for _, key := range []string{
		v1alpha1.ClaimNameAnnotation, v1alpha1.ClaimHolderAnnotation, v1alpha1.ClaimSpokeAnnotation,
		v1alpha1.ClaimedAtAnnotation, v1alpha1.HandedOverAnnotation,
		v1alpha1.NodeRegisteredAtAnnotation, v1alpha1.FloorAnnotation, v1alpha1.ReleasedAnnotation, v1alpha1.ReleaseHook,
	} {
		delete(annotations, key)
	}
	if pausedByAgent(after) {
		delete(annotations, clusterv1.PausedAnnotation)
	}
	if annotations[clusterv1.MachineSkipRemediationAnnotation] == v1alpha1.Group {
		delete(annotations, clusterv1.MachineSkipRemediationAnnotation)
	}
	for _, key := range releaseMarks {
		if after.GetDeletionTimestamp().IsZero() && annotations[key] == v1alpha1.Group { // it was marked and lives: it is to stay
			delete(annotations, key)
		}
	}
	controllerutil.RemoveFinalizer(after, v1alpha1.ReleaseFinalizer)
	if len(labels)+len(annotations)+len(after.GetFinalizers()) == before {
		var none T
		return none
	}
	return after
}

func pausedByAgent(object client.Object) bool {
	return object.GetAnnotations()[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent
}

// deleteClaims deletes every MachineClaim of the selected Clusters.
func (e *Engine) deleteClaims(ctx context.Context, o UninstallOptions) error {
	var list v1alpha1.MachineClaimList
	if err := e.Reader.List(ctx, &list); err != nil {
		return fmt.Errorf("listing MachineClaims: %w", err)
	}
	deleted := 0
	for i := range list.Items {
		c := &list.Items[i]
		if !o.Serves(types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.ClusterName}) {
			continue
		}
		deleted++
		if o.DryRun {
			continue
		}
		if err := e.Client.Delete(ctx, c, preconditions(c.UID, "")); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("deleting MachineClaim %s/%s: %w", c.Namespace, c.Name, err)
		}
	}
	o.Report("%s %d MachineClaims", lo.Ternary(o.DryRun, "would delete", "deleted"), deleted)
	return nil
}
