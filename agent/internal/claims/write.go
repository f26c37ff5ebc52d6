package claims

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

const (
	fieldOwner = client.FieldOwner(v1alpha1.FieldManager)
	// historyLength is how many entries of a claim's history are kept.
	historyLength = 32
	// endedHistory is how many entries are kept for a claim that has ended: an ordinary life, and
	// what went wrong last.
	endedHistory = 8
	// parallelWrites bounds the writes that one step does at once.
	parallelWrites = 16
	// unknownHolder is the holder of a claim that was recreated from a Machine that does not record
	// its holder. Such claims are never collected.
	unknownHolder = "unknown"
	// releasedKept is how many UIDs a MachineSet keeps beyond those that the ledger relies on.
	releasedKept = 64
)

// operation is one operation of a JSON patch (RFC 6902). The value is written even when it is zero;
// "remove" ignores it.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

func test(path string, value any) operation { return operation{Op: "test", Path: path, Value: value} }

func put(path string, value any) operation { return operation{Op: "add", Path: path, Value: value} }

func annotationPath(key string) string {
	return "/metadata/annotations/" + strings.ReplaceAll(key, "/", "~1")
}

func labelPath(key string) string { return "/metadata/labels/" + strings.ReplaceAll(key, "/", "~1") }

// writeLedger writes the decision's ledger and replicas in one patch that tests what the decision
// was made from. It fails with [ErrConflict] if the ledger or the replicas have changed, or if a
// further test fails. It returns the MachineDeployment as written.
func (e *Engine) writeLedger(
	ctx context.Context, s *protocol.Snapshot, d *protocol.Decision, further ...operation,
) (*clusterv1.MachineDeployment, error) {
	next := d.Ledger.Clone()
	next.By = e.id
	next.Of, next.UID = client.ObjectKeyFromObject(s.Deployment).String(), s.Deployment.UID
	ops := further
	if s.Deployment.UID != "" {
		ops = append(ops, test("/metadata/uid", s.Deployment.UID)) // not one that was made again under its name
	}
	if s.Ledger == nil {
		next.Seq = 1
		text, broken := s.Deployment.Annotations[v1alpha1.LedgerAnnotation]
		switch {
		case broken:
			ops = append(ops, test(annotationPath(v1alpha1.LedgerAnnotation), text))
		case s.Deployment.Annotations == nil:
			const all = "/metadata/annotations"
			ops = append(ops, test(all, nil), put(all, map[string]string{})) // nil: there are none
		default:
			ops = append(ops, test(annotationPath(v1alpha1.LedgerAnnotation), nil))
		}
	} else {
		ops = append(ops, test(annotationPath(v1alpha1.LedgerAnnotation), s.Deployment.Annotations[v1alpha1.LedgerAnnotation]))
		next.Seq = s.Ledger.Seq + 1
	}
	ops = append(ops, test("/spec/replicas", s.Group.Replicas))
	if s.Ledger == nil || d.Removes {
		// The template decides which Machines are spares and which MachineSet is charged, so no
		// rollout may have begun unseen. And a ledger that was added and removed since the reading
		// left another generation, unless it changed nothing.
		ops = append(ops, test("/metadata/generation", s.Deployment.Generation))
	}
	switch { // a user may have set a size since
	case d.Replicas > s.Group.Replicas:
		ops = append(ops, asRead(s.Deployment, clusterv1.AutoscalerMaxSizeAnnotation))
	case d.Replicas < s.Group.Replicas:
		ops = append(ops, asRead(s.Deployment, clusterv1.AutoscalerMinSizeAnnotation))
	}
	ops = append(ops, put(annotationPath(v1alpha1.LedgerAnnotation), next.Encode()),
		put(annotationPath(v1alpha1.ClaimedAnnotation), strconv.Itoa(int(d.Claimed))))
	kind := "ledger"
	if d.Replicas != s.Group.Replicas {
		kind = "replicas"
		ops = append(ops, operation{Op: "replace", Path: "/spec/replicas", Value: d.Replicas})
	}
	if d.Lowered != "" {
		ops = append(ops, put(annotationPath(v1alpha1.ReplicasLoweredAnnotation), d.Lowered))
	}
	switch d.Pause {
	case protocol.PauseSet:
		// No test of a single field can show that no other actor has paused it.
		ops = append(ops, test("/metadata/resourceVersion", s.Deployment.ResourceVersion))
		ops = append(ops, put(annotationPath(clusterv1.PausedAnnotation), v1alpha1.PausedByAgent))
	case protocol.PauseRemove:
		if s.Deployment.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent {
			ops = append(ops,
				test(annotationPath(clusterv1.PausedAnnotation), v1alpha1.PausedByAgent),
				operation{Op: "remove", Path: annotationPath(clusterv1.PausedAnnotation)})
		}
	case protocol.PauseKeep:
	}
	patch, err := json.Marshal(ops)
	if err != nil {
		return nil, fmt.Errorf("encoding the ledger's patch: %w", err)
	}
	md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: s.Deployment.Namespace, Name: s.Deployment.Name}}
	err = e.Client.Patch(ctx, md, client.RawPatch(types.JSONPatchType, patch), fieldOwner)
	countWrite(kind, err)
	switch {
	case err == nil:
		log.FromContext(ctx).V(1).Info("wrote the ledger", "machineDeployment", s.Deployment.Name, "replicas", d.Replicas, "was", s.Group.Replicas,
			"seq", next.Seq, "pending", len(next.Pending), "releasing", len(next.Releasing), "floor", next.Floor)
		if d.Lowered != "" {
			e.reportLowering(ctx, s, d)
		}
		return md, nil
	case testFailed(err), apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return nil, fmt.Errorf("writing the ledger: %w: %w", ErrConflict, err)
	case refusedForGood(err):
		e.warn(s.Deployment, protocol.ReasonWriteRefused, "WriteLedger", "claims and releases of this node group are held up: "+err.Error())
		return nil, fmt.Errorf("writing the ledger of MachineDeployment %s: %w: %w", s.Deployment.Name, ErrWriteRefused, err)
	default:
		return nil, fmt.Errorf("writing the ledger: %w", err)
	}
}

// asRead returns the test that an annotation is as it was read, or is still absent.
func asRead(md *clusterv1.MachineDeployment, key string) operation {
	if text, present := md.Annotations[key]; present {
		return test(annotationPath(key), text)
	}
	return test(annotationPath(key), nil)
}

// unchanged returns the tests that nothing of a MachineDeployment has changed except its status.
func unchanged(md *clusterv1.MachineDeployment) []operation {
	return []operation{
		test("/metadata/generation", md.Generation), test("/metadata/labels", md.Labels), test("/metadata/annotations", md.Annotations),
		test("/metadata/deletionTimestamp", md.DeletionTimestamp),
	}
}

// testFailed reports whether a test of a JSON patch failed. The API server reports that as Invalid,
// like a refusal by validation or a policy; but those list causes or state that they denied the
// request.
func testFailed(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) {
		return false
	}
	details := status.Status().Details
	return (details == nil || len(details.Causes) == 0) && !denied(status)
}

// refusedForGood reports whether the API server or an admission policy refuses a write for its
// content.
func refusedForGood(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) &&
		(apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err) || denied(status)) && !testFailed(err)
}

// denied reports whether a webhook or a ValidatingAdmissionPolicy refused a request.
func denied(err apierrors.APIStatus) bool {
	message := err.Status().Message
	return strings.Contains(message, "denied the request") || strings.Contains(message, "denied request")
}

// reportLowering reports that the MachineDeployment is frozen, and why, by an event, a metric and
// the log.
func (e *Engine) reportLowering(ctx context.Context, s *protocol.Snapshot, d *protocol.Decision) {
	countLowering(s.Deployment.Namespace, s.Deployment.Name)
	if e.Recorder != nil {
		e.Recorder.Eventf(s.Deployment, nil, corev1.EventTypeWarning, d.LoweredReason, "Freeze", "%s", d.Lowered)
	}
	log.FromContext(ctx).Info("froze a node group whose replicas another writer sets",
		"machineDeployment", s.Deployment.Name, "replicas", s.Group.Replicas, "cause", d.Lowered)
}

// perform does the actions, several at once, and reports whether any of them changed something. A
// write that lost a race is left to the next step.
func (e *Engine) perform(ctx context.Context, s *protocol.Snapshot, actions []protocol.Action) (bool, error) {
	var progress atomic.Bool
	var (
		work errgroup.Group // not one that stops at the first error: each write concerns another claim
		errs = make([]error, len(actions))
	)
	work.SetLimit(e.parallel)
	cluster := types.NamespacedName{Namespace: s.Deployment.Namespace, Name: s.Deployment.Spec.ClusterName}
	for i, a := range actions {
		write := func() error {
			defer e.writes.take(cluster)()
			err := recovered(ctx, func() error { return e.do(ctx, a) })
			countAction(a.Kind, err)
			switch {
			case err == nil:
				progress.Store(true)
				return nil
			case lostRace(err), apierrors.IsAlreadyExists(err):
				log.FromContext(ctx).V(1).Info("lost a race; the next step looks again", "action", a.Kind, "cause", err.Error())
				return nil
			default:
				if refusedForGood(err) {
					_ = recovered(ctx, func() error { // logs a panic
						e.reportRefusal(ctx, s, a, err)
						return nil
					})
				}
				errs[i] = fmt.Errorf("%s on node group %s: %w", a.Kind, s.Deployment.Name, err)
				return nil
			}
		}
		if e.parallel == 1 {
			_ = write() // in place
		} else {
			work.Go(write)
		}
	}
	_ = work.Wait() // the errors are in errs
	if err := errors.Join(errs...); err != nil {
		failed := map[string]bool{}
		for i, a := range actions {
			if errs[i] != nil {
				failed[a.String()] = true
			}
		}
		return progress.Load(), &actionsError{error: err, of: failed}
	}
	return progress.Load(), nil
}

// actionsError is the error of actions that failed for another reason than a lost race. Nothing
// else failed.
type actionsError struct {
	error

	of map[string]bool // by the action's text
}

func (f *actionsError) Unwrap() error { return f.error }

// waitAnew restarts a claim's wait for a Machine, also if another write of its status came first. A
// claim that does not wait any more is left as it is.
func (e *Engine) waitAnew(ctx context.Context, claim *v1alpha1.MachineClaim, event v1alpha1.Event) error {
	restart := func(c *v1alpha1.MachineClaim) error {
		c.Status.WaitingSince = new(metav1.NewTime(e.Clock.Now()))
		e.note(c, event)
		return e.writeStatus(ctx, c)
	}
	err := restart(claim.DeepCopy())
	if !apierrors.IsConflict(err) {
		return err
	}
	now, readErr := e.getUncached(ctx, Key{Namespace: claim.Namespace, Cluster: claim.Spec.ClusterName, ID: claim.Spec.ClaimID})
	if readErr != nil || now.UID != claim.UID || now.CurrentPhase() != v1alpha1.PhasePending {
		return err
	}
	return restart(now)
}

// reportRefusal records on a Machine's claim that a write on the Machine is refused, and why.
// Without the write the claim makes no progress. The refusal of a write on a MachineSet concerns
// all claims of its MachineDeployment, and is recorded there.
func (e *Engine) reportRefusal(ctx context.Context, s *protocol.Snapshot, a protocol.Action, cause error) {
	if a.Set != nil {
		e.warn(s.Deployment, protocol.ReasonWriteRefused, "WriteMachineSet",
			protocol.Line(fmt.Sprintf("the hub refuses a write on MachineSet %s (%s): %s", a.Set.Name, a.Kind, cause)))
	}
	if a.Machine == nil {
		return
	}
	if a.Kind == protocol.MarkRepair { // the claim goes on without it
		e.warn(s.Deployment, protocol.ReasonWriteRefused, "WriteMachine",
			protocol.Line(fmt.Sprintf("the hub refuses a write on Machine %s (%s): %s", a.Machine.Name, a.Kind, cause)))
		return
	}
	claim := a.Claim
	if claim == nil {
		claim = s.Claim(protocol.ClaimOf(a.Machine))
	}
	message := protocol.Line(fmt.Sprintf("the hub refuses a write on Machine %s (%s): %s", a.Machine.Name, a.Kind, cause))
	if claim == nil || claim.CurrentPhase() == v1alpha1.PhaseEnded || claim.Status.Message == message || e.refusalNoted(claim) {
		return
	}
	e.warn(claim, protocol.ReasonWriteRefused, "WriteMachine", message)
	if claim.Status.FailedAt != nil {
		return // why it failed matters more
	}
	c := claim.DeepCopy()
	e.note(c, v1alpha1.Event{Reason: protocol.ReasonWriteRefused, Message: message})
	if err := e.updateStatus(ctx, c); err != nil {
		log.FromContext(ctx).V(1).Info("could not note on the claim that a write is refused", "claim", c.Spec.ClaimID, "cause", err.Error())
	}
}

// refusedEvery is the minimum time between two texts of refusals on one claim. A policy may put the
// id of the request into its text, and each write of the status starts a run that is refused again.
const refusedEvery = time.Minute

// refusalNoted reports whether the claim has recorded a refusal within [refusedEvery], whatever its
// text, and nothing since.
func (e *Engine) refusalNoted(c *v1alpha1.MachineClaim) bool {
	n := len(c.Status.History)
	return c.Status.Reason == protocol.ReasonWriteRefused && n > 0 && e.Clock.Since(c.Status.History[n-1].Time.Time) < refusedEvery
}

// writeStatus writes a claim's status if the claim is still as it was read. The written claim
// replaces the caches' version until they show it.
func (e *Engine) writeStatus(ctx context.Context, c *v1alpha1.MachineClaim) error {
	if err := e.updateStatus(ctx, c); err != nil {
		return err
	}
	e.written.note(c.DeepCopy())
	return nil
}

func (e *Engine) do(ctx context.Context, a protocol.Action) error {
	switch a.Kind {
	case protocol.MarkAdmitted:
		c := a.Claim.DeepCopy()
		if err := e.own(ctx, c); err != nil {
			return err
		}
		c.Status.Phase, c.Status.NodeGroupUID = v1alpha1.PhasePending, a.Group
		c.Status.WaitingSince = new(metav1.NewTime(e.Clock.Now()))
		e.note(c, a.Event)
		return e.writeStatus(ctx, c)
	case protocol.WaitAnew:
		return e.waitAnew(ctx, a.Claim, a.Event)
	case protocol.Explain:
		c := a.Claim.DeepCopy()
		e.note(c, a.Event)
		return e.writeStatus(ctx, c)
	case protocol.Recreate:
		return e.recreate(ctx, a.Machine)
	case protocol.Restore:
		return e.restore(ctx, a)
	case protocol.Fail, protocol.TimeOut:
		return e.takeBack(ctx, a)
	case protocol.Bind:
		return e.bind(ctx, a)
	case protocol.Label:
		return e.label(ctx, a.Claim, a.Machine)
	case protocol.Unbind:
		return e.unbind(ctx, a)
	case protocol.End:
		return e.endClaim(ctx, a.Claim, a.Event)
	case protocol.MoveOn:
		return e.moveOn(ctx, a)
	case protocol.NoteMachine:
		c := a.Claim.DeepCopy()
		c.Status.Machine.ProviderID = a.Machine.Spec.ProviderID
		c.Status.Machine.NodeName = a.Machine.Status.NodeRef.Name
		e.note(c, a.Event)
		return e.writeStatus(ctx, c)
	case protocol.BeginDelete:
		return e.beginDelete(ctx, a)
	case protocol.RemoveFinalizer:
		m := a.Machine.DeepCopy()
		controllerutil.RemoveFinalizer(m, v1alpha1.ReleaseFinalizer)
		delete(m.Annotations, v1alpha1.ReleaseHook) // of an earlier version
		return e.patchMachine(ctx, a.Machine, m)
	case protocol.Return:
		m := a.Machine.DeepCopy()
		forgetClaim(m)
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.FloorAnnotation, v1alpha1.FloorReturned)
		return e.patchMachine(ctx, a.Machine, m)
	case protocol.MarkFloor:
		m := a.Machine.DeepCopy()
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.FloorAnnotation, "true")
		return e.patchAsRead(ctx, a.Machine, m) // no claim may have labelled it meanwhile
	case protocol.Keep:
		return e.keep(ctx, a.Machine)
	case protocol.MarkRepair:
		m := a.Machine.DeepCopy()
		protocol.SetRepair(m, a.Claim != nil && a.Claim.Spec.HolderRepairs)
		written, err := e.writeMachine(ctx, a.Machine, m)
		if err != nil {
			return err
		}
		_, wanted := m.Annotations[clusterv1.MachineSkipRemediationAnnotation]
		if _, has := written.Annotations[clusterv1.MachineSkipRemediationAnnotation]; has != wanted {
			// Otherwise it would be written again and again, without a pause.
			return fmt.Errorf("a webhook of the hub reverts a change of the annotation %s", clusterv1.MachineSkipRemediationAnnotation)
		}
		return nil
	case protocol.LowerSet:
		return e.lowerSet(ctx, a)
	case protocol.PauseMachineSet:
		set := a.Set.DeepCopy()
		metav1.SetMetaDataAnnotation(&set.ObjectMeta, clusterv1.PausedAnnotation, v1alpha1.PausedByAgent)
		return e.patchSet(ctx, a.Set, set)
	case protocol.UnpauseMachineSet:
		set := a.Set.DeepCopy()
		delete(set.Annotations, clusterv1.PausedAnnotation)
		return e.patchSet(ctx, a.Set, set)
	}
	panic("unknown action " + a.Kind)
}

// bind decides the race between binding and releasing by the claim's phase, and then labels the
// Machine.
func (e *Engine) bind(ctx context.Context, a protocol.Action) error {
	c := a.Claim.DeepCopy()
	c.Status.Phase, c.Status.NodeGroupUID = v1alpha1.PhaseBound, a.Group
	c.Status.Machine = &v1alpha1.MachineReference{Name: a.Machine.Name, UID: a.Machine.UID, ProviderID: a.Machine.Spec.ProviderID}
	c.Status.BoundAt = new(metav1.NewTime(e.Clock.Now()))
	message := "bound to Machine " + a.Machine.Name
	if c.Spec.Adopt != "" && protocol.HasNode(a.Machine) {
		// In the same write, because there may be many adoptions at once. Pods may run on the Node,
		// even before the holder reports it.
		c.Status.Machine.NodeName, c.Status.NodeRegisteredAt = a.Machine.Status.NodeRef.Name, c.Status.BoundAt
		message += ", which it adopts with its Node " + c.Status.Machine.NodeName
	}
	e.note(c, v1alpha1.Event{Reason: protocol.ReasonBound, Message: message})
	if err := e.writeStatus(ctx, c); err != nil {
		return err
	}
	return e.label(ctx, c, a.Machine)
}

// recreate creates a MachineClaim again from the metadata of its Machine. The next step restores
// its status. It fails as after a lost race if the Machine is not the claim's any more, or if the
// Cluster is gone or paused.
func (e *Engine) recreate(ctx context.Context, m *clusterv1.Machine) error {
	// While a hub is put back to an earlier state, the cache of Machines may still show those from
	// later. A claim without its Machine would ask for another one.
	now := &clusterv1.Machine{}
	if err := e.Reader.Get(ctx, client.ObjectKeyFromObject(m), now); err != nil {
		return err
	}
	if now.UID != m.UID || protocol.ClaimOf(now) != protocol.ClaimOf(m) {
		return apierrors.NewNotFound(clusterv1.GroupVersion.WithResource("machines").GroupResource(), m.Name)
	}
	cluster, err := e.UnpausedCluster(ctx, types.NamespacedName{Namespace: m.Namespace, Name: m.Spec.ClusterName})
	switch clusters := clusterv1.GroupVersion.WithResource("clusters").GroupResource(); {
	case errors.Is(err, ErrUnknownCluster): // it would own the claim
		return apierrors.NewNotFound(clusters, m.Spec.ClusterName)
	case errors.Is(err, ErrClusterPaused): // the claim may be on its way from another hub
		return apierrors.NewConflict(clusters, m.Spec.ClusterName, err)
	case err != nil:
		return err
	}
	group := m.Labels[clusterv1.MachineDeploymentNameLabel]
	// An annotation that a person edited must not make the API server refuse the object.
	holder := m.Annotations[v1alpha1.ClaimHolderAnnotation]
	if len(validation.IsDNS1123Label(holder)) > 0 {
		holder = unknownHolder
	}
	spoke := m.Annotations[v1alpha1.ClaimSpokeAnnotation]
	if len(validation.IsDNS1123Label(spoke)) > 0 {
		spoke = "" // not known
	}
	name := []rune(protocol.Line(m.Annotations[v1alpha1.ClaimNameAnnotation]))
	c := e.newClaim(Request{
		Namespace: m.Namespace, Cluster: m.Spec.ClusterName, ID: protocol.ClaimOf(m), Candidates: []string{group},
		Holder:      holder,
		Spoke:       spoke,
		DisplayName: string(name[:min(len(name), validation.DNS1123SubdomainMaxLength)]),

		HolderRepairs: m.Annotations[clusterv1.MachineSkipRemediationAnnotation] == v1alpha1.Group,
	}, cluster, group)
	if err := e.Client.Create(ctx, c); err != nil {
		return err
	}
	log.FromContext(ctx).Info("recreated a lost MachineClaim from its Machine's label", "claim", protocol.ClaimOf(m), "machine", m.Name)
	return nil
}

// restore binds a claim to the Machine that carries its label, or continues the release of that
// Machine.
func (e *Engine) restore(ctx context.Context, a protocol.Action) error {
	c := a.Claim.DeepCopy()
	if err := e.own(ctx, c); err != nil {
		return err
	}
	if c.Status.Phase != v1alpha1.PhaseReleasing {
		c.Status.Phase = v1alpha1.PhaseBound
	}
	if a.Returned {
		c.Status.Phase, c.Status.Returned = v1alpha1.PhaseBound, true
	}
	if a.Release.Machine != "" {
		c.Status.Phase, c.Status.Drained = v1alpha1.PhaseReleasing, a.Release.Drained
		c.Status.ReleasedAt = new(metav1.NewTime(e.Clock.Now()))
	}
	c.Status.Machine = &v1alpha1.MachineReference{
		Name: a.Machine.Name, UID: a.Machine.UID, ProviderID: a.Machine.Spec.ProviderID, NodeName: a.Machine.Status.NodeRef.Name,
	}
	c.Status.NodeGroupUID = a.Group
	if c.Status.BoundAt == nil {
		c.Status.BoundAt = new(metav1.NewTime(e.Clock.Now()))
	}
	if a.Remade && a.Machine.Spec.ProviderID != "" && c.Status.NodeRegisteredAt == nil {
		c.Status.NodeRegisteredAt = new(metav1.NewTime(e.Clock.Now())) // its Node may have been reported, so the claim must not be collected
	}
	if c.Status.FailedAt == nil { // why it failed matters more
		event := v1alpha1.Event{
			Reason: protocol.ReasonBound, Message: "the claim's status was lost and was restored from the label of Machine " + a.Machine.Name,
		}
		if c.Status.Phase == v1alpha1.PhaseBound && !c.Status.Returned && !protocol.Alive(a.Machine) {
			event.Reason = protocol.ReasonMachineDeleting
			event.Message += ", which another actor is deleting"
		}
		e.note(c, event)
	}
	return e.writeStatus(ctx, c)
}

// own makes the Cluster the owner of a claim that has none, because backups may leave owners out.
// Without an owner, the claim would not be deleted or moved with the Cluster.
func (e *Engine) own(ctx context.Context, c *v1alpha1.MachineClaim) error {
	if len(c.OwnerReferences) > 0 {
		return nil
	}
	cluster, err := e.cluster(ctx, c.Namespace, c.Spec.ClusterName)
	if err != nil || cluster == nil {
		return err
	}
	c.OwnerReferences = ownedBy(cluster)
	return e.Client.Update(ctx, c)
}

// label writes the lasting binding, if the Machine has no claim and has had none since it was read.
func (e *Engine) label(ctx context.Context, c *v1alpha1.MachineClaim, machine *clusterv1.Machine) error {
	m := machine.DeepCopy()
	metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.ClaimLabel, c.Spec.ClaimID)
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.ClaimNameAnnotation, c.Spec.DisplayName)
	if c.Spec.DisplayName != "" && len(validation.IsValidLabelValue(c.Spec.DisplayName)) == 0 {
		metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.ClaimNameLabel, c.Spec.DisplayName)
	}
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.ClaimHolderAnnotation, c.Spec.Holder)
	if c.Spec.Spoke != "" {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.ClaimSpokeAnnotation, c.Spec.Spoke)
	}
	delete(m.Annotations, v1alpha1.FloorAnnotation) // the claim adopts it, or the mark came too late
	if !protocol.HasFinalizer(m) {
		delete(m.Annotations, clusterv1.DeleteMachineAnnotation) // else Cluster API would remove it first when anyone lowers replicas
	}
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.ClaimedAtAnnotation, e.Clock.Now().UTC().Format(time.RFC3339))
	if err := e.patchMachine(ctx, machine, m); err != nil {
		return err
	}
	observeBound(e.Clock, c)
	return nil
}

// unbind takes the label off a Machine, so that the next claim may have it.
func (e *Engine) unbind(ctx context.Context, a protocol.Action) error {
	m := a.Machine.DeepCopy()
	forgetClaim(m)
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.HandedOverAnnotation, protocol.ClaimOf(a.Machine))
	return e.patchAsRead(ctx, a.Machine, m) // it must still have no Node
}

// forgetClaim removes what [Engine.label] wrote.
func forgetClaim(m *clusterv1.Machine) {
	delete(m.Labels, v1alpha1.ClaimLabel)
	delete(m.Labels, v1alpha1.ClaimNameLabel)
	delete(m.Annotations, v1alpha1.ClaimNameAnnotation)
	delete(m.Annotations, v1alpha1.ClaimHolderAnnotation)
	delete(m.Annotations, v1alpha1.ClaimSpokeAnnotation)
	delete(m.Annotations, v1alpha1.ClaimedAtAnnotation)
}

// patchAsRead writes the difference if the Machine has not changed at all since it was read.
func (e *Engine) patchAsRead(ctx context.Context, before, after *clusterv1.Machine) error {
	return e.Client.Patch(ctx, after, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), fieldOwner)
}

// beginDelete marks the Machine, adds the finalizer and deletes it. Replicas do not change: the
// slot is kept until the Machine is gone.
func (e *Engine) beginDelete(ctx context.Context, a protocol.Action) error {
	m := a.Machine.DeepCopy()
	controllerutil.AddFinalizer(m, v1alpha1.ReleaseFinalizer)
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.DeleteMachineAnnotation, v1alpha1.Group)
	spareDraining(m, a.Release)
	if err := e.patchMachine(ctx, a.Machine, m); err != nil {
		return err
	}
	version := ""
	if protocol.HasFinalizer(a.Machine) {
		version = m.ResourceVersion // the patch did not test that the finalizer stays
	}
	return e.Client.Delete(ctx, m, preconditions(m.UID, version))
}

// releaseMarks are the annotations that a release writes on its Machine, with the agent's group as
// their value.
var releaseMarks = []string{
	clusterv1.DeleteMachineAnnotation, clusterv1.ExcludeNodeDrainingAnnotation, clusterv1.ExcludeWaitForNodeVolumeDetachAnnotation,
}

// keep undoes what beginDelete did to a Machine that lives. The MachineSet controller may restore
// the finalizer from its cache, because it writes the whole list for live Machines. The finalizer
// is removed as often as it is seen.
func (e *Engine) keep(ctx context.Context, machine *clusterv1.Machine) error {
	m := machine.DeepCopy()
	controllerutil.RemoveFinalizer(m, v1alpha1.ReleaseFinalizer)
	for _, key := range releaseMarks {
		if m.Annotations[key] == v1alpha1.Group {
			delete(m.Annotations, key)
		}
	}
	return e.patchMachine(ctx, machine, m)
}

// spareDraining tells Cluster API not to drain a Node that the caller has drained.
func spareDraining(m *clusterv1.Machine, r protocol.Release) {
	if r.Drained {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.ExcludeNodeDrainingAnnotation, v1alpha1.Group)
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.ExcludeWaitForNodeVolumeDetachAnnotation, v1alpha1.Group)
	}
}

// lowerSet lowers a MachineSet and records in the same write for which Machines.
func (e *Engine) lowerSet(ctx context.Context, a protocol.Action) error {
	set := a.Set.DeepCopy()
	replicas := max(0, protocol.ReplicasOf(set)-int32(len(a.UIDs)))
	set.Spec.Replicas = &replicas
	var before []types.UID // nothing depends on these any more
	uids := slices.Clone(a.UIDs)
	for _, uid := range protocol.ReleasedFrom(set) {
		if slices.Contains(a.Counts, uid) {
			uids = append(uids, uid)
		} else {
			before = append(before, uid)
		}
	}
	uids = append(uids, before[max(0, len(before)-releasedKept):]...)
	metav1.SetMetaDataAnnotation(&set.ObjectMeta, v1alpha1.ReleasedAnnotation, protocol.JoinUIDs(uids))
	return e.patchSet(ctx, a.Set, set)
}

// patchSet writes the difference if the MachineSet is still as it was read.
func (e *Engine) patchSet(ctx context.Context, before, after *clusterv1.MachineSet) error {
	return e.Client.Patch(ctx, after, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), fieldOwner)
}

// patchMachine writes the difference of labels, annotations and finalizers, if everything that the
// protocol reads there is unchanged: it is the same Machine, it has the same claim and had no other
// meanwhile, and no actor has begun to delete it. Other writes by Cluster API, which are frequent
// while a Machine is new or being deleted, do not make it fail.
func (e *Engine) patchMachine(ctx context.Context, before, after *clusterv1.Machine) error {
	_, err := e.writeMachine(ctx, before, after)
	return err
}

// writeMachine is [Engine.patchMachine], and returns the Machine as the API server has it then.
func (e *Engine) writeMachine(ctx context.Context, before, after *clusterv1.Machine) (*clusterv1.Machine, error) {
	ops := []operation{test("/metadata/uid", before.UID)}
	if protocol.Alive(before) {
		ops = append(ops, test("/metadata/deletionTimestamp", nil)) // nil: there is none
	}
	ops = append(ops, change(labelPath, before.Labels, after.Labels, v1alpha1.ClaimLabel)...)
	ops = append(ops, change(annotationPath, before.Annotations, after.Annotations,
		v1alpha1.HandedOverAnnotation, v1alpha1.FloorAnnotation, clusterv1.DeleteMachineAnnotation)...)
	if !slices.Equal(before.Finalizers, after.Finalizers) {
		const path = "/metadata/finalizers"
		if len(before.Finalizers) == 0 {
			ops = append(ops, test(path, nil), put(path, after.Finalizers))
		} else {
			ops = append(ops, test(path, before.Finalizers), put(path, after.Finalizers))
		}
	}
	patch, err := json.Marshal(ops)
	if err != nil {
		return nil, fmt.Errorf("encoding a Machine's patch: %w", err)
	}
	// Into an empty object: fields that the response omits would stay in one that is filled.
	written := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: before.Namespace, Name: before.Name}}
	err = e.Client.Patch(ctx, written, client.RawPatch(types.JSONPatchType, patch), fieldOwner)
	switch {
	case testFailed(err):
		return nil, apierrors.NewConflict(schema.GroupResource{Group: clusterv1.GroupVersion.Group, Resource: "machines"}, before.Name, err)
	case err != nil:
		return nil, err
	}
	e.written.note(written)
	after.ResourceVersion = written.ResourceVersion
	return written, nil
}

// change returns the operations that turn one map of an object's metadata into another. They first
// test the previous values of the changed keys and of the further ones.
func change(path func(key string) string, before, after map[string]string, further ...string) []operation {
	changed := map[string]bool{}
	for _, values := range []map[string]string{before, after} {
		for key := range values {
			old, had := before[key]
			if value, has := after[key]; had != has || old != value {
				changed[key] = true
			}
		}
	}
	var tests, changes []operation
	if before == nil {
		if len(changed) == 0 {
			return nil
		}
		whole := strings.TrimSuffix(path(""), "/")
		tests = append(tests, test(whole, nil), put(whole, map[string]string{}))
	}
	for key := range changed {
		if value, has := after[key]; has {
			changes = append(changes, put(path(key), value))
		} else {
			changes = append(changes, operation{Op: "remove", Path: path(key)})
		}
		further = append(further, key)
	}
	for _, key := range further {
		if value, had := before[key]; had {
			tests = append(tests, test(path(key), value))
		} else {
			tests = append(tests, test(path(key), nil))
		}
	}
	return append(tests, changes...)
}

// takeBack begins the release of a claim whose Machine failed or is late. Only a failure keeps the
// Machine from the next claim and makes the node group cool down.
func (e *Engine) takeBack(ctx context.Context, a protocol.Action) error {
	c := a.Claim.DeepCopy()
	now := metav1.NewTime(e.Clock.Now())
	c.Status.Phase = v1alpha1.PhaseReleasing
	c.Status.ReleasedAt = &now
	if a.Kind == protocol.Fail {
		c.Status.FailedAt, c.Status.FailureClass = &now, string(a.Class)
	}
	e.note(c, a.Event)
	if err := e.writeStatus(ctx, c); err != nil {
		return err
	}
	e.event(c, a.Event.Reason, "GiveUp", a.Event.Message)
	if a.Kind == protocol.Fail && c.Status.NodeGroupUID != "" { // the node group cools down
		group := &clusterv1.MachineDeployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Spec.NodeGroup, UID: c.Status.NodeGroupUID},
			Spec:       clusterv1.MachineDeploymentSpec{ClusterName: c.Spec.ClusterName}, // its events are counted by Cluster
		}
		e.warn(group, "ClaimFailed", "GiveUp", fmt.Sprintf("claim %s (%s) failed: %s", c.Spec.ClaimID, c.Spec.DisplayName, a.Event.Message))
	}
	log.FromContext(ctx).Info("released a claim", "claim", c.Spec.ClaimID, "name", c.Spec.DisplayName, "reason", a.Event.Reason,
		"cause", a.Event.Message)
	return nil
}

// endClaim moves the claim to Ended if it is still as it was read.
func (e *Engine) endClaim(ctx context.Context, claim *v1alpha1.MachineClaim, why v1alpha1.Event) error {
	c := claim.DeepCopy()
	c.Status.Phase = v1alpha1.PhaseEnded
	now := metav1.NewTime(e.Clock.Now())
	c.Status.EndedAt = &now
	c.Status.Returned = why.Reason == protocol.ReasonReturned
	e.note(c, why)
	c.Status.History = c.Status.History[max(0, len(c.Status.History)-endedHistory):]
	if err := e.writeStatus(ctx, c); err != nil {
		return err
	}
	countEnded(c, why.Reason)
	e.event(c, why.Reason, "End", why.Message)
	log.FromContext(ctx).Info("claim ended", "claim", c.Spec.ClaimID, "name", c.Spec.DisplayName, "reason", why.Reason)
	return nil
}

// moveOn moves a claim to the next candidate that takes it, or ends it.
func (e *Engine) moveOn(ctx context.Context, a protocol.Action) error {
	if err := e.known(ctx, a.Claim); errors.Is(err, ErrRestoring) {
		return e.endClaim(ctx, a.Claim, v1alpha1.Event{
			Reason: protocol.ReasonStateLost, Message: "the claim was moved or restored without its status, and its MachineDeployment was replaced",
		})
	} else if err != nil {
		return err
	}
	next, err := e.nextCandidate(ctx, a.Claim)
	if err != nil {
		return err
	}
	if next.none() && a.Claim.Spec.Adopt != "" {
		return e.retract(ctx, a.Claim)
	}
	if next.none() {
		return e.endClaim(ctx, a.Claim, a.Event)
	}
	moved, err := e.moveTo(ctx, a.Claim, next)
	if err != nil {
		return err
	}
	e.group(moved.Namespace, next.first()).kick(ctx)
	return nil
}

// moveTo makes another candidate the claim's node group if the claim is still as it was read. The
// claim keeps the candidates that are left.
func (e *Engine) moveTo(ctx context.Context, c *v1alpha1.MachineClaim, next choice) (*v1alpha1.MachineClaim, error) {
	moved := c.DeepCopy()
	moved.Spec.NodeGroup, moved.Spec.Candidates = next.first(), next.candidates
	metav1.SetMetaDataLabel(&moved.ObjectMeta, v1alpha1.NodeGroupLabel, next.first())
	if err := e.Client.Update(ctx, moved); err != nil {
		return nil, err
	}
	return moved, nil
}

// note adds an event to the claim's history and makes it the present reason. It does not write the
// claim.
func (e *Engine) note(c *v1alpha1.MachineClaim, event v1alpha1.Event) {
	event.Time = metav1.NewTime(e.Clock.Now())
	c.Status.History = append(c.Status.History, event)
	if extra := len(c.Status.History) - historyLength; extra > 0 {
		c.Status.History = c.Status.History[extra:]
	}
	for i := range c.Status.History { // also entries of an agent that did not cut them
		c.Status.History[i].Message = protocol.Line(c.Status.History[i].Message)
	}
	c.Status.Reason, c.Status.Message = event.Reason, protocol.Line(event.Message)
}

func preconditions(uid types.UID, resourceVersion string) client.Preconditions {
	p := client.Preconditions{UID: &uid}
	if resourceVersion != "" {
		p.ResourceVersion = &resourceVersion
	}
	return p
}
