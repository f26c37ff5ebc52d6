package nodepools

import (
	"cmp"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/pkg/nodepoolset"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// maxPerCluster is how many objects are published to one Cluster. A report has as many results.
const maxPerCluster = 64

// Key is the key of an object in the cache, and in the stream.
func Key(object *agentv1alpha1.PublishedObject) string {
	return object.GetKind() + "/" + object.GetName()
}

// entry is an entry of a NodePoolSet.
type entry struct {
	set     *v1alpha1.NodePoolSet
	object  *agentv1alpha1.PublishedObject
	invalid string // why it can be published nowhere
}

// entriesOf returns the entries of each set, by its name.
func entriesOf(sets []v1alpha1.NodePoolSet) map[string][]entry {
	all := make(map[string][]entry, len(sets))
	for i := range sets {
		all[sets[i].Name] = entries(&sets[i])
	}
	return all
}

// entries returns the entries of a set, with what is wrong with them.
func entries(set *v1alpha1.NodePoolSet) []entry {
	var all []entry
	for _, list := range []struct {
		field, kind string
		templates   []v1alpha1.PublishedTemplate
	}{
		{"nodeClasses", nodepoolset.NodeClass, set.Spec.NodeClasses},
		{"nodePools", nodepoolset.NodePool, set.Spec.NodePools},
	} {
		for i := range list.templates {
			all = append(all, newEntry(set, list.kind, fmt.Sprintf("spec.%s[%d]", list.field, i), &list.templates[i]))
		}
	}
	return all
}

func newEntry(set *v1alpha1.NodePoolSet, kind, field string, template *v1alpha1.PublishedTemplate) entry {
	policy := agentv1alpha1.DeletionPolicy_DELETION_POLICY_RETAIN
	if set.Spec.DeletionPolicy == v1alpha1.DeletionPolicyDelete {
		policy = agentv1alpha1.DeletionPolicy_DELETION_POLICY_DELETE
	}
	object := nodepoolset.Template{
		Name: template.Name, Labels: plain(template.Labels), Annotations: plain(template.Annotations), Spec: template.Spec.Raw,
	}.Object(set.Name, policy, kind, field)
	return entry{set: set, object: object, invalid: object.GetProblem()}
}

func plain(values map[string]v1alpha1.PublishedValue) map[string]string {
	into := make(map[string]string, len(values))
	for key, value := range values {
		into[key] = string(value)
	}
	return into
}

// unpublished is an entry of a selecting set that is not published to a Cluster, because another
// set publishes the same object.
type unpublished struct {
	set, message string
}

// plan returns what is published to a Cluster with these labels, ordered by kind and name, and what
// is not. The sets are all of the Cluster's namespace, in the order of [byAge], and all has their
// entries, which Clusters share.
func plan(
	clusterLabels map[string]string, sets []v1alpha1.NodePoolSet, all map[string][]entry,
) (published []*agentv1alpha1.PublishedObject, not []unpublished) {
	taken := map[string]*agentv1alpha1.PublishedObject{}
	for i := range sets {
		set := &sets[i]
		if !selects(set, clusterLabels) {
			continue
		}
		for _, e := range all[set.Name] {
			key := Key(e.object)
			if by, exists := taken[key]; exists {
				not = append(not, unpublished{set.Name, fmt.Sprintf("%s %s: the NodePoolSet %s publishes it, which is older",
					e.object.GetKind(), e.object.GetName(), by.GetSet())})
				continue
			}
			if len(taken) >= maxPerCluster && e.object.GetProblem() == "" {
				e.object = proto.CloneOf(e.object)
				e.object.SpecJson = ""
				e.object.Problem = fmt.Sprintf("at most %d objects are published to a Cluster, and older NodePoolSets publish that many", maxPerCluster)
				e.object.Revision = nodepoolset.Revision(e.object)
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
