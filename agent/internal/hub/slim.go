package hub

import (
	"slices"
	"unique"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Slim reduces the size of cached Machines and MachineClaims, which are numerous, and strips
// managed fields from every object. It is a [k8s.io/client-go/tools/cache.TransformFunc].
//
// It removes what the agent does not read. A cached Machine or MachineClaim must therefore never be
// written as a whole: Machines are written with patches computed from two copies of one reading,
// and only the status of MachineClaims is written. Labels and annotations are kept unchanged,
// because such patches test them.
//
// Strings that many objects share are stored once.
func Slim(object any) (any, error) {
	if o, ok := object.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	switch o := object.(type) {
	case *clusterv1.Machine:
		slimMachine(o)
	case *v1alpha1.MachineClaim:
		slimClaim(o)
	}
	return object, nil
}

// ordinary maps conditions of Machines to their usual status. The protocol and the messages only
// read a deviating status: for them, the usual status means the same as a missing condition.
var ordinary = map[string]metav1.ConditionStatus{
	clusterv1.MachineUpToDateCondition:            metav1.ConditionTrue,
	clusterv1.MachineInfrastructureReadyCondition: metav1.ConditionTrue,
	clusterv1.MachineNodeReadyCondition:           metav1.ConditionTrue,
	clusterv1.MachineDeletingCondition:            metav1.ConditionFalse,
}

// isRead reports whether a condition of a Machine is kept. The condition about pauses is always
// kept, because the time since the end of a pause is read.
func isRead(m *clusterv1.Machine, c *metav1.Condition) bool {
	if c.Type == clusterv1.PausedCondition {
		return true
	}
	status, read := ordinary[c.Type]
	return read && (c.Status != status || !m.DeletionTimestamp.IsZero())
}

func slimMachine(m *clusterv1.Machine) {
	shareMeta(&m.ObjectMeta)
	m.Spec = clusterv1.MachineSpec{
		ClusterName: shared(m.Spec.ClusterName),
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{
			APIGroup: shared(m.Spec.InfrastructureRef.APIGroup), Kind: shared(m.Spec.InfrastructureRef.Kind),
			Name: shared(m.Spec.InfrastructureRef.Name),
		},
		Version:       shared(m.Spec.Version),
		ProviderID:    m.Spec.ProviderID,
		FailureDomain: shared(m.Spec.FailureDomain),
	}
	var conditions []metav1.Condition
	for i := range m.Status.Conditions {
		c := m.Status.Conditions[i]
		if isRead(m, &c) {
			c.Type, c.Status, c.Reason = shared(c.Type), shared(c.Status), shared(c.Reason)
			conditions = append(conditions, c)
		}
	}
	m.Status = clusterv1.MachineStatus{
		Conditions:    exact(conditions),
		NodeRef:       m.Status.NodeRef,
		LastUpdated:   m.Status.LastUpdated,
		FailureDomain: shared(m.Status.FailureDomain),
		Phase:         shared(m.Status.Phase),
	}
}

// slimClaim removes the candidates, which are only needed while a claim has no node group, the
// conditions, which are derived anew for each write, and the history of an ended claim.
func slimClaim(c *v1alpha1.MachineClaim) {
	shareMeta(&c.ObjectMeta)
	spec, status := &c.Spec, &c.Status
	spec.Candidates, status.Conditions = nil, nil
	spec.ClusterName, spec.NodeGroup = shared(spec.ClusterName), shared(spec.NodeGroup)
	spec.ClusterUID, spec.Holder, spec.Spoke = shared(spec.ClusterUID), shared(spec.Holder), shared(spec.Spoke)
	status.Phase, status.Reason, status.NodeGroupUID = shared(status.Phase), shared(status.Reason), shared(status.NodeGroupUID)
	if c.CurrentPhase() == v1alpha1.PhaseEnded && status.EndedAt != nil {
		status.History = nil
	}
	status.History = exact(status.History)
	for i := range status.History {
		event := &status.History[i]
		event.Reason = shared(event.Reason)
		if event.Message == status.Message {
			event.Message = status.Message // share the bytes
		}
	}
}

// shareMeta shares the strings that an object's metadata has in common with other objects: all
// keys, and all values that are not unique to the object.
func shareMeta(o *metav1.ObjectMeta) {
	o.Namespace = shared(o.Namespace)
	o.Labels, o.Annotations = shareMap(o.Labels), shareMap(o.Annotations)
	for i := range o.OwnerReferences {
		owner := &o.OwnerReferences[i]
		owner.APIVersion, owner.Kind, owner.Name, owner.UID = shared(owner.APIVersion), shared(owner.Kind), shared(owner.Name), shared(owner.UID)
	}
	o.OwnerReferences = exact(o.OwnerReferences)
	for i := range o.Finalizers {
		o.Finalizers[i] = shared(o.Finalizers[i])
	}
	o.Finalizers = exact(o.Finalizers)
}

// ownValues are the keys of labels and annotations whose values are unique to an object.
var ownValues = []string{
	v1alpha1.ClaimLabel, v1alpha1.ClaimNameLabel, v1alpha1.ClaimedAtAnnotation, v1alpha1.HandedOverAnnotation, v1alpha1.NodeRegisteredAtAnnotation,
	v1alpha1.RequestIDAnnotation, v1alpha1.TraceIDAnnotation,
}

func shareMap(from map[string]string) map[string]string {
	if from == nil {
		return nil
	}
	into := make(map[string]string, len(from)) // unlike the decoder's map, this one has no spare capacity
	for key, value := range from {
		if !slices.Contains(ownValues, key) {
			value = shared(value)
		}
		into[shared(key)] = value
	}
	return into
}

// exact returns a slice without spare capacity. Decoders allocate slices for at least four
// elements.
func exact[T any](s []T) []T {
	if len(s) == cap(s) {
		return s
	}
	return append(make([]T, 0, len(s)), s...)
}

// shared returns an equal string whose bytes are shared with all equal strings.
func shared[T ~string](s T) T { return T(unique.Make(string(s)).Value()) }
