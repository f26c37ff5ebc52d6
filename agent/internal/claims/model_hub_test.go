package claims

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// kind is one of the resources that the model's hub has.
type kind string

const (
	clusters    kind = "clusters"
	deployments kind = "machinedeployments"
	machineSets kind = "machinesets"
	allMachines kind = "machines"
	allClaims   kind = "machineclaims"
)

var allKinds = []kind{clusters, deployments, machineSets, allMachines, allClaims}

func kindOf(o client.Object) kind {
	switch o.(type) {
	case *clusterv1.Cluster:
		return clusters
	case *clusterv1.MachineDeployment:
		return deployments
	case *clusterv1.MachineSet:
		return machineSets
	case *clusterv1.Machine:
		return allMachines
	case *v1alpha1.MachineClaim:
		return allClaims
	}
	panic(fmt.Sprintf("the model's hub does not know %T", o))
}

func (k kind) resource() schema.GroupResource { return schema.GroupResource{Resource: string(k)} }

// objects are the objects of one kind at one moment, by name. They are never changed in place.
type objects map[string]client.Object

// hub is an API server for one namespace. It implements what the protocol relies on: optimistic
// concurrency, generations, status subresources, finalizers, preconditions, and JSON and merge
// patches. It is a hundred times faster than a fake client that keeps field ownership.
type hub struct {
	clock   clock.Clock
	objects map[kind]objects
	version int64 // of the last write
	created int
	// history has the result of every write, oldest first, if recorded is set.
	history  []revision
	recorded bool
}

// revision is the result of one write for one object.
type revision struct {
	kind kind
	name string
	// after is nil when the object is gone.
	after client.Object
}

func (r revision) String() string {
	what := "written"
	if r.after == nil {
		what = "removed"
	}
	return fmt.Sprintf("%s %s %s", r.kind, r.name, what)
}

// apply brings a cache up to date with the revision.
func (r revision) apply(cache map[kind]objects) {
	if r.after == nil {
		delete(cache[r.kind], r.name)
	} else {
		cache[r.kind][r.name] = r.after
	}
}

func (h *hub) record(r revision) {
	if h.recorded {
		h.history = append(h.history, r)
	}
}

func newHub(c clock.Clock) *hub {
	h := &hub{clock: c, objects: map[kind]objects{}}
	for _, k := range allKinds {
		h.objects[k] = objects{}
	}
	return h
}

// snapshot returns a kind's objects as they are now; later writes do not change it.
func (h *hub) snapshot(k kind) objects { return maps.Clone(h.objects[k]) }

func (h *hub) find(k kind, name string) (client.Object, error) {
	if o, found := h.objects[k][name]; found {
		return o, nil
	}
	return nil, apierrors.NewNotFound(k.resource(), name)
}

func (h *hub) create(o client.Object) error {
	k := kindOf(o)
	if _, exists := h.objects[k][o.GetName()]; exists {
		return apierrors.NewAlreadyExists(k.resource(), o.GetName())
	}
	h.created++
	o.SetUID(types.UID(fmt.Sprintf("uid-%d", h.created)))
	o.SetCreationTimestamp(metav1.NewTime(h.clock.Now()))
	o.SetGeneration(1)
	stored := copyOf(o)
	if c, ok := stored.(*v1alpha1.MachineClaim); ok {
		c.Status = v1alpha1.MachineClaimStatus{}
	}
	h.store(stored)
	o.SetResourceVersion(stored.GetResourceVersion())
	return nil
}

// update writes all of the object except its status, or only its status.
func (h *hub) update(o client.Object, status bool) error {
	k := kindOf(o)
	before, err := h.find(k, o.GetName())
	if err != nil {
		return err
	}
	if version := o.GetResourceVersion(); version != "" && version != before.GetResourceVersion() {
		return apierrors.NewConflict(k.resource(), o.GetName(), fmt.Errorf("version %s is not current", version))
	}
	after := copyOf(before)
	if status {
		copyStatus(after, o)
	} else {
		after = copyOf(o)
		copyStatus(after, before)
	}
	if lossy(before, after) {
		panic(fmt.Sprintf("%s %s is written whole as a cache keeps it", k, o.GetName()))
	}
	if err := valid(after); err != nil {
		return err
	}
	h.replace(before, after)
	if now, found := h.objects[k][o.GetName()]; found {
		o.SetResourceVersion(now.GetResourceVersion())
	}
	return nil
}

// lossy reports whether a write drops fields that caches do not keep and that no agent removes.
func lossy(before, after client.Object) bool {
	switch b := before.(type) {
	case *v1alpha1.MachineClaim:
		a, ok := after.(*v1alpha1.MachineClaim)
		if !ok {
			return true
		}
		forgets := a.Status.Phase != "" && len(a.Status.History) < min(endedHistory, len(b.Status.History)) // a restore may lose all of it
		return forgets || len(b.Spec.Candidates) > 0 && len(a.Spec.Candidates) == 0
	case *clusterv1.Machine:
		a, ok := after.(*clusterv1.Machine)
		return !ok || b.Spec.InfrastructureRef.Name != a.Spec.InfrastructureRef.Name
	}
	return false
}

// patch applies a JSON or a merge patch to all of the object except its status.
func (h *hub) patch(o client.Object, patchType types.PatchType, data []byte) error {
	k := kindOf(o)
	before, err := h.find(k, o.GetName())
	if err != nil {
		return err
	}
	text, err := json.Marshal(before)
	if err != nil {
		return fmt.Errorf("encoding: %w", err)
	}
	switch patchType {
	case types.JSONPatchType:
		var p jsonpatch.Patch
		if p, err = jsonpatch.DecodePatch(data); err == nil {
			text, err = p.Apply(text)
		}
		if err != nil { // like the real one for a failed test
			return apierrors.NewInvalid(schema.GroupKind{Kind: string(k)}, o.GetName(), nil)
		}
	case types.MergePatchType:
		if text, err = jsonpatch.MergePatch(text, data); err != nil {
			return apierrors.NewBadRequest(err.Error())
		}
	default:
		return apierrors.NewBadRequest("the model's hub does not know patches of type " + string(patchType))
	}
	after := newOf(before)
	if err := json.Unmarshal(text, after); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	if after.GetResourceVersion() != before.GetResourceVersion() || after.GetUID() != before.GetUID() {
		return apierrors.NewConflict(k.resource(), o.GetName(), fmt.Errorf("version %s is not current", after.GetResourceVersion()))
	}
	copyStatus(after, before)
	if lossy(before, after) {
		panic(fmt.Sprintf("a patch removes from %s %s what caches do not keep", k, o.GetName()))
	}
	if err := valid(after); err != nil {
		return err
	}
	h.replace(before, after)
	if now, found := h.objects[k][o.GetName()]; found {
		assign(o, now)
	}
	return nil
}

// valid returns the real API server's error for annotations that are too long; nil when they are
// not.
func valid(o client.Object) error {
	if validation.ValidateAnnotationsSize(o.GetAnnotations()) == nil {
		return nil
	}
	return apierrors.NewInvalid(schema.GroupKind{Kind: string(kindOf(o))}, o.GetName(), field.ErrorList{
		field.TooLong(field.NewPath("metadata", "annotations"), "", validation.TotalAnnotationSizeLimitB),
	})
}

// remove begins an object's deletion, and completes it once no finalizer is left.
func (h *hub) remove(o client.Object, p *metav1.Preconditions) error {
	k := kindOf(o)
	before, err := h.find(k, o.GetName())
	if err != nil {
		return err
	}
	if p != nil && (p.UID != nil && *p.UID != before.GetUID() || p.ResourceVersion != nil && *p.ResourceVersion != before.GetResourceVersion()) {
		return apierrors.NewConflict(k.resource(), o.GetName(), errors.New("the precondition does not hold"))
	}
	if !before.GetDeletionTimestamp().IsZero() {
		return nil
	}
	after := copyOf(before)
	now := metav1.NewTime(h.clock.Now())
	after.SetDeletionTimestamp(&now)
	h.replace(before, after)
	return nil
}

// replace stores the result of a write; nothing new if the write changed nothing.
func (h *hub) replace(before, after client.Object) {
	after.SetResourceVersion(before.GetResourceVersion())
	if equality.Semantic.DeepEqual(before, after) {
		return
	}
	if !before.GetDeletionTimestamp().IsZero() {
		after.SetDeletionTimestamp(before.GetDeletionTimestamp())
	}
	after.SetGeneration(before.GetGeneration())
	if !sameSpec(before, after) {
		after.SetGeneration(before.GetGeneration() + 1)
	}
	if !after.GetDeletionTimestamp().IsZero() && len(after.GetFinalizers()) == 0 {
		h.version++
		delete(h.objects[kindOf(after)], after.GetName())
		h.record(revision{kind: kindOf(after), name: after.GetName()})
		return
	}
	h.store(after)
}

func (h *hub) store(o client.Object) {
	if len(o.GetAnnotations()) == 0 {
		o.SetAnnotations(nil) // as decoded from JSON
	}
	h.version++
	o.SetResourceVersion(strconv.FormatInt(h.version, 10))
	h.objects[kindOf(o)][o.GetName()] = o
	h.record(revision{kind: kindOf(o), name: o.GetName(), after: o})
}

// list returns the objects that the options select, by name. The caller must not change them.
func list(from objects, o *client.ListOptions) []client.Object {
	var selected []client.Object
	for _, name := range slices.Sorted(maps.Keys(from)) {
		object := from[name]
		if o.LabelSelector != nil && !o.LabelSelector.Matches(labels.Set(object.GetLabels())) {
			continue
		}
		if o.FieldSelector != nil && !o.FieldSelector.Matches(fieldsOf(object)) {
			continue
		}
		selected = append(selected, object)
	}
	return selected
}

func fieldsOf(o client.Object) fields.Set {
	set := fields.Set{"metadata.name": o.GetName()}
	if c, ok := o.(*v1alpha1.MachineClaim); ok {
		set["status.phase"] = string(c.Status.Phase)
	}
	return set
}

// fill copies the objects into a typed list.
func fill(into client.ObjectList, from []client.Object) {
	switch l := into.(type) {
	case *clusterv1.MachineDeploymentList:
		l.Items = items[clusterv1.MachineDeployment](from)
	case *clusterv1.MachineSetList:
		l.Items = items[clusterv1.MachineSet](from)
	case *clusterv1.MachineList:
		l.Items = items[clusterv1.Machine](from)
	case *v1alpha1.MachineClaimList:
		l.Items = items[v1alpha1.MachineClaim](from)
	default:
		panic(fmt.Sprintf("the model's hub does not know %T", into))
	}
}

func kindOfList(l client.ObjectList) kind {
	switch l.(type) {
	case *clusterv1.MachineDeploymentList:
		return deployments
	case *clusterv1.MachineSetList:
		return machineSets
	case *clusterv1.MachineList:
		return allMachines
	case *v1alpha1.MachineClaimList:
		return allClaims
	}
	panic(fmt.Sprintf("the model's hub does not know %T", l))
}

func items[T any, P interface {
	*T
	DeepCopyInto(into *T)
}](from []client.Object,
) []T {
	out := make([]T, len(from))
	for i, o := range from {
		o.(any).(P).DeepCopyInto(&out[i]) //nolint:forcetypeassert // of the list's kind
	}
	return out
}

func copyOf(o client.Object) client.Object {
	return o.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy has the same type
}

func newOf(o client.Object) client.Object {
	switch kindOf(o) {
	case clusters:
		return &clusterv1.Cluster{}
	case deployments:
		return &clusterv1.MachineDeployment{}
	case machineSets:
		return &clusterv1.MachineSet{}
	case allMachines:
		return &clusterv1.Machine{}
	case allClaims:
	}
	return &v1alpha1.MachineClaim{}
}

// assign makes into a copy of from, which has the same type.
func assign(into, from client.Object) {
	switch o := into.(type) {
	case *clusterv1.Cluster:
		from.(*clusterv1.Cluster).DeepCopyInto(o) //nolint:forcetypeassert // of the same type
	case *clusterv1.MachineDeployment:
		from.(*clusterv1.MachineDeployment).DeepCopyInto(o) //nolint:forcetypeassert // of the same type
	case *clusterv1.MachineSet:
		from.(*clusterv1.MachineSet).DeepCopyInto(o) //nolint:forcetypeassert // of the same type
	case *clusterv1.Machine:
		from.(*clusterv1.Machine).DeepCopyInto(o) //nolint:forcetypeassert // of the same type
	case *v1alpha1.MachineClaim:
		from.(*v1alpha1.MachineClaim).DeepCopyInto(o) //nolint:forcetypeassert // of the same type
	}
}

// copyStatus gives one object the status of another of the same type.
func copyStatus(into, from client.Object) {
	from = copyOf(from)
	switch o := into.(type) {
	case *clusterv1.Cluster:
		o.Status = from.(*clusterv1.Cluster).Status //nolint:forcetypeassert // of the same type
	case *clusterv1.MachineDeployment:
		o.Status = from.(*clusterv1.MachineDeployment).Status //nolint:forcetypeassert // of the same type
	case *clusterv1.MachineSet:
		o.Status = from.(*clusterv1.MachineSet).Status //nolint:forcetypeassert // of the same type
	case *clusterv1.Machine:
		o.Status = from.(*clusterv1.Machine).Status //nolint:forcetypeassert // of the same type
	case *v1alpha1.MachineClaim:
		o.Status = from.(*v1alpha1.MachineClaim).Status //nolint:forcetypeassert // of the same type
	}
}

func sameSpec(a, b client.Object) bool {
	switch o := a.(type) {
	case *clusterv1.MachineDeployment:
		return equality.Semantic.DeepEqual(o.Spec, b.(*clusterv1.MachineDeployment).Spec) //nolint:forcetypeassert // of the same type
	case *clusterv1.MachineSet:
		return equality.Semantic.DeepEqual(o.Spec, b.(*clusterv1.MachineSet).Spec) //nolint:forcetypeassert // of the same type
	case *clusterv1.Machine:
		return equality.Semantic.DeepEqual(o.Spec, b.(*clusterv1.Machine).Spec) //nolint:forcetypeassert // of the same type
	case *v1alpha1.MachineClaim:
		return equality.Semantic.DeepEqual(o.Spec, b.(*v1alpha1.MachineClaim).Spec) //nolint:forcetypeassert // of the same type
	}
	return true
}
