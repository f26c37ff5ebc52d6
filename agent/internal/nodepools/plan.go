package nodepools

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// These are the kinds of published objects.
const (
	NodePool  = "NodePool"
	NodeClass = "ClusterAPINodeClass"
)

// maxPerCluster is how many objects are published to one Cluster. A report has as many results.
const maxPerCluster = 64

// Key is the key of an object in the feed, and in the stream.
func Key(object *agentv1alpha1.PublishedObject) string {
	return object.GetKind() + "/" + object.GetName()
}

// entry is an entry of a NodePoolSet.
type entry struct {
	set     *v1alpha1.NodePoolSet
	object  *agentv1alpha1.PublishedObject
	invalid string // why it can be published nowhere
}

// entries returns the entries of a set, with what is wrong with them.
func entries(set *v1alpha1.NodePoolSet) []entry {
	var all []entry
	for _, list := range []struct {
		field, kind string
		templates   []v1alpha1.PublishedTemplate
	}{
		{"nodeClasses", NodeClass, set.Spec.NodeClasses},
		{"nodePools", NodePool, set.Spec.NodePools},
	} {
		for i := range list.templates {
			all = append(all, newEntry(set, list.kind, fmt.Sprintf("spec.%s[%d]", list.field, i), &list.templates[i]))
		}
	}
	return all
}

func newEntry(set *v1alpha1.NodePoolSet, kind, field string, template *v1alpha1.PublishedTemplate) entry {
	object := &agentv1alpha1.PublishedObject{
		Kind: kind, Name: template.Name, Set: set.Name, DeletionPolicy: agentv1alpha1.DeletionPolicy_DELETION_POLICY_RETAIN,
		Labels: plain(template.Labels), Annotations: plain(template.Annotations),
	}
	if set.Spec.DeletionPolicy == v1alpha1.DeletionPolicyDelete {
		object.DeletionPolicy = agentv1alpha1.DeletionPolicy_DELETION_POLICY_DELETE
	}
	problem := metadataProblem(template)
	spec, err := canonical(template.Spec.Raw)
	switch {
	case problem != "":
	case err != nil:
		problem = "spec: " + err.Error()
	case len(spec) > v1alpha1.MaxPublishedSpecBytes:
		problem = fmt.Sprintf("spec: %d bytes of JSON, but at most %d are published", len(spec), v1alpha1.MaxPublishedSpecBytes)
	default:
		object.SpecJson = spec
	}
	if problem != "" {
		problem = field + "." + problem
		object.Problem = problem
	}
	object.Revision = revision(object)
	return entry{set: set, object: object, invalid: problem}
}

func plain(values map[string]v1alpha1.PublishedValue) map[string]string {
	if len(values) == 0 {
		return nil
	}
	into := make(map[string]string, len(values))
	for key, value := range values {
		into[key] = string(value)
	}
	return into
}

// metadataProblem returns the first invalid label or annotation, or nothing.
func metadataProblem(template *v1alpha1.PublishedTemplate) string {
	var problems []string
	for key, value := range template.Labels {
		for _, problem := range slices.Concat(validation.IsQualifiedName(key), validation.IsValidLabelValue(string(value))) {
			problems = append(problems, fmt.Sprintf("labels[%s]: %s", key, problem))
		}
	}
	for key := range template.Annotations {
		for _, problem := range validation.IsQualifiedName(strings.ToLower(key)) {
			problems = append(problems, fmt.Sprintf("annotations[%s]: %s", key, problem))
		}
	}
	if len(problems) == 0 {
		return ""
	}
	return slices.Min(problems)
}

// canonical returns a JSON object with sorted keys and without spaces, so that agents agree on its
// revision.
func canonical(raw []byte) (string, error) {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	var spec map[string]any
	if err := decoder.Decode(&spec); err != nil {
		return "", fmt.Errorf("not a JSON object: %w", err)
	}
	encoded, err := json.Marshal(spec)
	return string(encoded), err
}

func revision(object *agentv1alpha1.PublishedObject) string {
	content, err := json.Marshal([]any{
		object.GetKind(), object.GetName(), object.GetSet(), object.GetLabels(), object.GetAnnotations(), object.GetSpecJson(),
		object.GetDeletionPolicy().String(), object.GetProblem(),
	})
	if err != nil {
		panic(err) // strings always marshal
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:8])
}

// unpublished is an entry of a selecting set that is not published to a Cluster, because another set
// publishes the same object.
type unpublished struct {
	set, message string
}

// plan returns what is published to a Cluster with these labels, ordered by kind and name, and what
// is not. The sets are all of the Cluster's namespace, in the order of [byAge].
func plan(clusterLabels map[string]string, sets []v1alpha1.NodePoolSet) (published []*agentv1alpha1.PublishedObject, not []unpublished) {
	taken := map[string]*agentv1alpha1.PublishedObject{}
	for i := range sets {
		set := &sets[i]
		if !selects(set, clusterLabels) {
			continue
		}
		for _, e := range entries(set) {
			key := Key(e.object)
			if by, exists := taken[key]; exists {
				not = append(not, unpublished{set.Name, fmt.Sprintf("%s %s: the NodePoolSet %s publishes it, which is older",
					e.object.GetKind(), e.object.GetName(), by.GetSet())})
				continue
			}
			if len(taken) >= maxPerCluster && e.object.GetProblem() == "" {
				e.object.SpecJson = ""
				e.object.Problem = fmt.Sprintf("at most %d objects are published to a Cluster, and older NodePoolSets publish that many", maxPerCluster)
				e.object.Revision = revision(e.object)
			}
			taken[key] = e.object
			published = append(published, e.object)
		}
	}
	slices.SortFunc(published, func(a, b *agentv1alpha1.PublishedObject) int { return cmp.Compare(Key(a), Key(b)) })
	return published, not
}

// selects reports whether a set publishes to Clusters with these labels.
func selects(set *v1alpha1.NodePoolSet, clusterLabels map[string]string) bool {
	if !set.DeletionTimestamp.IsZero() || set.Spec.ClusterSelector == nil {
		return false
	}
	selector, err := metav1.LabelSelectorAsSelector(set.Spec.ClusterSelector)
	return err == nil && selector.Matches(labels.Set(clusterLabels))
}

// byAge sorts sets: the older one publishes an object that several name.
func byAge(sets []v1alpha1.NodePoolSet) {
	slices.SortFunc(sets, func(a, b v1alpha1.NodePoolSet) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
}
