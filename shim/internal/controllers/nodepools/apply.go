package nodepools

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/json" // keeps whole numbers as they are
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/csaupgrade"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/karpenter/pkg/apis"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/events"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// kinds are the kinds that are published. Others are reported as not known, for a newer agent.
var kinds = map[string]schema.GroupVersionKind{
	"NodePool":            {Group: apis.Group, Version: "v1", Kind: "NodePool"},
	"ClusterAPINodeClass": v1alpha1.GroupVersion.WithKind("ClusterAPINodeClass"),
}

// applied identifies an object in the API server after a revision was applied.
type applied struct {
	revision    string
	fingerprint string
}

// fingerprint changes whenever a user changes the object, but not when its status changes.
func fingerprint(object metav1.Object) string {
	content, err := json.Marshal([]any{object.GetUID(), object.GetGeneration(), object.GetLabels(), object.GetAnnotations()})
	if err != nil {
		return "" // never: strings and numbers always marshal
	}
	return string(content)
}

func metadataOf(kind schema.GroupVersionKind) *metav1.PartialObjectMetadata {
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(kind)
	return object
}

// keyOf is [agentclient.PublishedKey] of an object in the spoke.
func keyOf(object *metav1.PartialObjectMetadata) string { return object.Kind + "/" + object.Name }

// cached reads an object of one of the kinds from the cache.
func (c *Controller) cached(ctx context.Context, kind, objectName string) (client.Object, error) {
	var object client.Object = &karpv1.NodePool{}
	if kind != "NodePool" {
		object = &v1alpha1.ClusterAPINodeClass{}
	}
	return object, c.Kube.Get(ctx, types.NamespacedName{Name: objectName}, object)
}

// apply makes the object in the spoke what is published. It returns why it could not, or nothing.
func (c *Controller) apply(ctx context.Context, published *agentv1alpha1.PublishedObject) string {
	kind, known := kinds[published.GetKind()]
	if !known {
		return fmt.Sprintf("the shim does not know the kind %s; upgrade it", published.GetKind())
	}
	key := agentclient.PublishedKey(published)
	if object, err := c.cached(ctx, published.GetKind(), published.GetName()); err == nil &&
		c.applied[key] == (applied{published.GetRevision(), fingerprint(object)}) {
		return ""
	}
	wanted, err := c.wanted(kind, published)
	if err != nil {
		return err.Error()
	}
	live := metadataOf(kind)
	err = c.Live.Get(ctx, types.NamespacedName{Name: published.GetName()}, live)
	switch {
	case apierrors.IsNotFound(err):
		// A server-side apply would merge with an object that has appeared meanwhile.
		err = c.Kube.Create(ctx, wanted, client.FieldOwner(FieldManager))
	case err != nil:
	case live.Labels[v1alpha1.PublishedByLabel] == "":
		return "an object of this name exists that was not published from the hub, or whose label " + v1alpha1.PublishedByLabel +
			" was removed: it is left as it is"
	case live.DeletionTimestamp != nil:
		return "the object is being deleted"
	default:
		err = c.update(ctx, live, wanted, published.GetRevision())
	}
	if err != nil {
		return err.Error()
	}
	c.applied[key] = applied{published.GetRevision(), fingerprint(wanted)}
	log.FromContext(ctx).Info("applied an object that the hub publishes", "kind", published.GetKind(), "name", published.GetName(),
		"set", published.GetSet(), "revision", published.GetRevision())
	return ""
}

// wanted returns the published object with our label and annotations.
func (c *Controller) wanted(kind schema.GroupVersionKind, published *agentv1alpha1.PublishedObject) (*unstructured.Unstructured, error) {
	spec := map[string]any{}
	if err := json.Unmarshal([]byte(published.GetSpecJson()), &spec); err != nil {
		return nil, fmt.Errorf("spec: %w", err)
	}
	object := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	object.SetGroupVersionKind(kind)
	object.SetName(published.GetName())
	labels, annotations := map[string]string{}, map[string]string{}
	maps.Copy(labels, published.GetLabels())
	maps.Copy(annotations, published.GetAnnotations())
	labels[v1alpha1.PublishedByLabel] = published.GetSet()
	annotations[v1alpha1.PublishedFromAnnotation] = c.Cluster.GetNamespace() + "/" + published.GetSet()
	annotations[v1alpha1.PublishedRevisionAnnotation] = published.GetRevision()
	annotations[v1alpha1.PublishedPolicyAnnotation] = "Retain"
	if published.GetDeletionPolicy() == agentv1alpha1.DeletionPolicy_DELETION_POLICY_DELETE {
		annotations[v1alpha1.PublishedPolicyAnnotation] = deletes
	}
	object.SetLabels(labels)
	object.SetAnnotations(annotations)
	return object, nil
}

// deletes is the value of the annotation with the deletion policy that deletes.
const deletes = "Delete"

// ownAsApplied turns the ownership of a created object's fields into that of a server-side apply.
// Otherwise, fields that are published no longer would stay.
func (c *Controller) ownAsApplied(ctx context.Context, object client.Object) error {
	patch, err := csaupgrade.UpgradeManagedFieldsPatch(object, sets.New(FieldManager), FieldManager)
	if err != nil || len(patch) == 0 {
		return err
	}
	return c.Kube.Patch(ctx, object, client.RawPatch(types.JSONPatchType, patch), client.FieldOwner(FieldManager))
}

// update applies the object. Fields of others are taken only if this revision was applied before:
// all of its fields were ours then, and another actor has changed them since.
func (c *Controller) update(ctx context.Context, live *metav1.PartialObjectMetadata, wanted *unstructured.Unstructured, revision string) error {
	if err := c.ownAsApplied(ctx, live); err != nil {
		return err
	}
	wanted.SetUID(live.UID) // if it is deleted meanwhile, it is not created again
	options := []client.ApplyOption{client.FieldOwner(FieldManager)}
	if live.Annotations[v1alpha1.PublishedRevisionAnnotation] == revision {
		options = append(options, client.ForceOwnership)
	}
	return c.Kube.Apply(ctx, client.ApplyConfigurationFromUnstructured(wanted), options...)
}

// removeUnpublished deletes or releases the objects that carry our label and are not published. It
// tries those that it could not change again at the next interval.
func (c *Controller) removeUnpublished(ctx context.Context) error {
	ours, err := c.ours(ctx)
	if err != nil {
		return err
	}
	var gone []*metav1.PartialObjectMetadata
	for _, object := range ours {
		key := keyOf(object)
		if _, published := c.Published.Get(key); published {
			delete(c.kept, key)
		} else if at, kept := c.kept[key]; object.DeletionTimestamp == nil && (!kept || c.Clock.Since(at) >= askInterval) {
			gone = append(gone, object)
		}
	}
	if len(gone) == 0 {
		return nil
	}
	// Only the hub's API server knows whether the Cluster is about to move to another hub.
	calling, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	response, err := c.Agent.ListPublishedObjects(calling, &agentv1alpha1.ListPublishedObjectsRequest{Cluster: c.Cluster})
	if err != nil {
		log.FromContext(ctx).V(1).Info("keeping objects for now that no longer seem to be published", "cause", err.Error())
		return nil
	}
	published := map[string]bool{}
	for _, object := range response.GetObjects() {
		published[agentclient.PublishedKey(object)] = true
	}
	for _, object := range gone {
		if published[keyOf(object)] {
			continue
		}
		if !slices.Contains(response.GetSets(), object.Labels[v1alpha1.PublishedByLabel]) {
			c.keep(ctx, object)
			continue
		}
		if err := c.remove(ctx, object); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
			// One that an admission webhook protects must not keep the others, or the report.
			log.FromContext(ctx).Error(err, "an object that the hub no longer publishes cannot be changed", "kind", object.Kind, "name", object.Name)
			c.announce(object, corev1.EventTypeWarning, "UnpublishingRefused",
				fmt.Sprintf("The hub no longer publishes this object, and the shim tries again: %v", err))
		}
	}
	return nil
}

// ours returns the objects with our label, NodePools first: a NodeClass waits for its NodePools.
func (c *Controller) ours(ctx context.Context) ([]*metav1.PartialObjectMetadata, error) {
	var all []*metav1.PartialObjectMetadata
	labelled := client.HasLabels{v1alpha1.PublishedByLabel}
	add := func(kind string, meta metav1.ObjectMeta) {
		object := metadataOf(kinds[kind])
		object.ObjectMeta = *meta.DeepCopy()
		all = append(all, object)
	}
	nodePools, nodeClasses := &karpv1.NodePoolList{}, &v1alpha1.ClusterAPINodeClassList{}
	if err := c.Kube.List(ctx, nodePools, labelled); err != nil {
		return nil, fmt.Errorf("listing NodePools: %w", err)
	}
	for i := range nodePools.Items {
		add("NodePool", nodePools.Items[i].ObjectMeta)
	}
	if err := c.Kube.List(ctx, nodeClasses, labelled); err != nil {
		return nil, fmt.Errorf("listing ClusterAPINodeClasses: %w", err)
	}
	for i := range nodeClasses.Items {
		add("ClusterAPINodeClass", nodeClasses.Items[i].ObjectMeta)
	}
	return all, nil
}

// keep leaves an object as it is whose NodePoolSet the hub does not have. It may have been deleted,
// or not been restored yet.
func (c *Controller) keep(ctx context.Context, object *metav1.PartialObjectMetadata) {
	set, key := object.Labels[v1alpha1.PublishedByLabel], keyOf(object)
	if _, known := c.kept[key]; !known {
		log.FromContext(ctx).Info("keeping an object whose NodePoolSet is not in the hub", "kind", object.Kind, "name", object.Name, "set", set)
		c.announce(object, corev1.EventTypeNormal, "NodePoolSetMissing", fmt.Sprintf("The hub has no NodePoolSet %s: this object is left unchanged. "+
			"To make it the spoke's own, remove the label %s.", set, v1alpha1.PublishedByLabel))
	}
	c.kept[key] = c.Clock.Now()
}

// remove deletes the object if its policy is to, and otherwise removes our label and annotations.
// It fails if the object has changed since it was read.
func (c *Controller) remove(ctx context.Context, object *metav1.PartialObjectMetadata) error {
	set := object.Labels[v1alpha1.PublishedByLabel]
	delete(c.applied, keyOf(object))
	delete(c.kept, keyOf(object))
	made := object.Annotations[v1alpha1.PublishedFromAnnotation] == c.Cluster.GetNamespace()+"/"+set
	if made && object.Annotations[v1alpha1.PublishedPolicyAnnotation] == deletes {
		log.FromContext(ctx).Info("deleting an object that the hub no longer publishes", "kind", object.Kind, "name", object.Name, "set", set)
		c.announce(object, corev1.EventTypeNormal, "Unpublished",
			"The NodePoolSet "+set+" no longer publishes this object. Its deletion policy is Delete.")
		return c.Kube.Delete(ctx, object, client.Preconditions{UID: &object.UID, ResourceVersion: &object.ResourceVersion})
	}
	before := object.DeepCopy()
	delete(object.Labels, v1alpha1.PublishedByLabel)
	for _, key := range []string{v1alpha1.PublishedFromAnnotation, v1alpha1.PublishedRevisionAnnotation, v1alpha1.PublishedPolicyAnnotation} {
		delete(object.Annotations, key)
	}
	err := c.Kube.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), client.FieldOwner(FieldManager))
	if err == nil {
		log.FromContext(ctx).Info("keeping an object that the hub no longer publishes", "kind", object.Kind, "name", object.Name, "set", set)
		c.announce(object, corev1.EventTypeNormal, "Unpublished",
			"The NodePoolSet "+set+" no longer publishes this object. It is kept, and now belongs to the spoke.")
	}
	return err
}

func (c *Controller) announce(object *metav1.PartialObjectMetadata, kind, reason, message string) {
	c.Recorder.Publish(events.Event{
		InvolvedObject: object, Type: kind, Reason: reason, Message: message, DedupeValues: []string{string(object.UID), message},
	})
}
