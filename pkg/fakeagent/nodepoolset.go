package fakeagent

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/nodepoolset"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// DeletionPolicy is what happens to an object in the spoke that its NodePoolSet no longer
// publishes.
type DeletionPolicy string

const (
	// DeletionPolicyRetain leaves the object in the spoke.
	DeletionPolicyRetain DeletionPolicy = "Retain"
	// DeletionPolicyDelete deletes the object.
	DeletionPolicyDelete DeletionPolicy = "Delete"
)

// reservedPrefix begins the labels and annotations that the shim sets.
const reservedPrefix = "karpenter.cluster.x-k8s.io/published-"

// NodePoolSet is a NodePoolSet as a user writes it. It selects one Cluster.
type NodePoolSet struct {
	// Name is the name of the NodePoolSet. REQUIRED.
	Name string
	// Cluster is the Cluster that it selects. Nil means [DefaultCluster].
	Cluster *agentv1alpha1.ClusterRef
	// DeletionPolicy applies to every entry. Empty means [DeletionPolicyRetain].
	DeletionPolicy DeletionPolicy
	// NodePools and NodeClasses are the entries. The agent's API server refuses a NodePoolSet
	// without any; here it is one whose entries have been removed.
	NodePools, NodeClasses []nodepoolset.Template
}

// Validate returns an error that names the first field that the agent's API server would refuse, by
// its name in scenarios.
func (s NodePoolSet) Validate() error {
	if problem := nameProblem(s.Name); problem != "" {
		return fmt.Errorf("name: %q is not a name of a NodePoolSet: %s", s.Name, problem)
	}
	switch s.DeletionPolicy {
	case "", DeletionPolicyRetain, DeletionPolicyDelete:
	default:
		return fmt.Errorf("deletionPolicy: %q is not one of Retain, Delete", s.DeletionPolicy)
	}
	for _, list := range s.lists() {
		seen := map[string]bool{}
		for i, template := range list.templates {
			field := fmt.Sprintf("%s[%d]", list.field, i)
			if err := validate(template, list.kind); err != nil {
				return fmt.Errorf("%s.%w", field, err)
			}
			if seen[template.Name] {
				return fmt.Errorf("%s.name: there is another %s %s", field, list.kind, template.Name)
			}
			seen[template.Name] = true
		}
	}
	return nil
}

func validate(t nodepoolset.Template, kind string) error {
	if problem := nameProblem(t.Name); problem != "" {
		return fmt.Errorf("name: %q is not a name of a %s: %s", t.Name, kind, problem)
	}
	for field, keys := range map[string]map[string]string{"labels": t.Labels, "annotations": t.Annotations} {
		for _, key := range slices.Sorted(maps.Keys(keys)) {
			if strings.HasPrefix(key, reservedPrefix) {
				return fmt.Errorf("%s[%s]: the shim sets keys that begin with %s", field, key, reservedPrefix)
			}
		}
	}
	if _, err := nodepoolset.Canonical(t.Spec); err != nil {
		return fmt.Errorf("spec: %w", err)
	}
	return nil
}

// nameProblem returns why the text is no name of a NodePoolSet or of an entry, or nothing.
func nameProblem(name string) string {
	if len(name) > validation.LabelValueMaxLength {
		return fmt.Sprintf("it has more than %d characters", validation.LabelValueMaxLength)
	}
	return strings.Join(validation.IsDNS1123Subdomain(name), "; ")
}

type templates struct {
	field, kind string
	templates   []nodepoolset.Template
}

func (s NodePoolSet) lists() []templates {
	return []templates{{"nodePools", nodepoolset.NodePool, s.NodePools}, {"nodeClasses", nodepoolset.NodeClass, s.NodeClasses}}
}

// entries returns what the NodePoolSet publishes.
func (s NodePoolSet) entries() []*agentv1alpha1.PublishedObject {
	policy := agentv1alpha1.DeletionPolicy_DELETION_POLICY_RETAIN
	if s.DeletionPolicy == DeletionPolicyDelete {
		policy = agentv1alpha1.DeletionPolicy_DELETION_POLICY_DELETE
	}
	var entries []*agentv1alpha1.PublishedObject
	for _, list := range s.lists() {
		for i, template := range list.templates {
			entries = append(entries, template.Object(s.Name, policy, list.kind, fmt.Sprintf("spec.%s[%d]", list.field, i)))
		}
	}
	return entries
}

// publishedSet is a NodePoolSet of one Cluster, with its entries.
type publishedSet struct {
	name    string
	entries []*agentv1alpha1.PublishedObject
}

// ApplyNodePoolSet creates the NodePoolSet, or replaces the one of that name. Of two that have an
// entry of the same kind and name, the older one publishes it. It panics if the agent's API server
// would refuse the NodePoolSet; see [NodePoolSet.Validate].
func (a *Agent) ApplyNodePoolSet(set NodePoolSet) {
	if err := set.Validate(); err != nil {
		panic(fmt.Sprintf("fakeagent: %v", err))
	}
	if set.Cluster == nil {
		set.Cluster = DefaultCluster()
	}
	a.edit(func() {
		a.publishedSet(keyOf(set.Cluster), set.Name).entries = set.entries()
		a.republish(keyOf(set.Cluster))
	})
}

// DeleteNodePoolSet deletes the NodePoolSet, with all that it publishes to the Cluster.
func (a *Agent) DeleteNodePoolSet(cluster *agentv1alpha1.ClusterRef, name string) {
	a.edit(func() {
		of := keyOf(cluster)
		a.nodePoolSets[of] = slices.DeleteFunc(a.nodePoolSets[of], func(set *publishedSet) bool { return set.name == name })
		a.republish(of)
	})
}

// Publish publishes an object to the Cluster, in place of an earlier one of the same kind and name.
// Its NodePoolSet is created if it does not exist, and is otherwise unchanged. An object without a
// revision gets one. [Agent.ApplyNodePoolSet] publishes what a user writes.
func (a *Agent) Publish(cluster *agentv1alpha1.ClusterRef, object *agentv1alpha1.PublishedObject) {
	object = proto.CloneOf(object)
	if object.GetRevision() == "" {
		object.Revision = nodepoolset.Revision(object)
	}
	a.edit(func() {
		a.withdraw(keyOf(cluster), client.PublishedKey(object))
		set := a.publishedSet(keyOf(cluster), object.GetSet())
		set.entries = append(set.entries, object)
		a.republish(keyOf(cluster))
	})
}

// Unpublish ends the publication of the object. Its NodePoolSet stays.
func (a *Agent) Unpublish(cluster *agentv1alpha1.ClusterRef, kind, name string) {
	a.edit(func() {
		a.withdraw(keyOf(cluster), kind+"/"+name)
		a.republish(keyOf(cluster))
	})
}

// publishedSet returns the Cluster's NodePoolSet of that name. It is created if it does not exist,
// like its Cluster.
func (a *Agent) publishedSet(cluster clusterKey, name string) *publishedSet {
	a.ensureCluster(cluster)
	for _, set := range a.nodePoolSets[cluster] {
		if set.name == name {
			return set
		}
	}
	set := &publishedSet{name: name}
	a.nodePoolSets[cluster] = append(a.nodePoolSets[cluster], set)
	return set
}

// withdraw removes the entry from every NodePoolSet of the Cluster.
func (a *Agent) withdraw(cluster clusterKey, key string) {
	for _, set := range a.nodePoolSets[cluster] {
		set.entries = slices.DeleteFunc(set.entries, func(object *agentv1alpha1.PublishedObject) bool {
			return client.PublishedKey(object) == key
		})
	}
}

// republish makes what the Cluster's NodePoolSets hold visible to callers.
func (a *Agent) republish(cluster clusterKey) {
	planned := map[string]*agentv1alpha1.PublishedObject{}
	for _, set := range a.nodePoolSets[cluster] {
		for _, object := range set.entries {
			if key := client.PublishedKey(object); planned[key] == nil {
				planned[key] = object
			}
		}
	}
	for _, shown := range a.publishedView.list(cluster, everything[*agentv1alpha1.PublishedObject]) {
		if key := client.PublishedKey(shown); planned[key] == nil {
			a.publishedView.remove(cluster, key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(planned)) {
		a.publishedView.put(cluster, key, planned[key])
	}
}

// setsOf returns the names of the Cluster's NodePoolSets, sorted.
func (a *Agent) setsOf(cluster clusterKey) []string {
	names := make([]string, 0, len(a.nodePoolSets[cluster]))
	for _, set := range a.nodePoolSets[cluster] {
		names = append(names, set.name)
	}
	slices.Sort(names)
	return names
}
