// Package nodegroup says what a MachineDeployment offers to whoever claims machines.
package nodegroup

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"regexp"
	"strings"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// NodeGroup is a MachineDeployment that machines can be claimed from.
type NodeGroup struct {
	// Key names the MachineDeployment, Cluster the Cluster, in the same namespace.
	Key, Cluster types.NamespacedName
	// Labels are the MachineDeployment's own.
	Labels map[string]string
	// Machine is what a machine of the group will be.
	Machine capacity.Description
	// Price is what one costs.
	Price pricing.Price
	// Limits say whether, and how many, machines may be claimed now.
	Limits eligibility.Group
	// Floor is how many of its replicas are the user's; 0 where the ledger cannot be read.
	Floor int32
	// KubernetesVersion is that of new machines; may be empty.
	KubernetesVersion string
	// TemplateRevision changes when new machines will differ from the present ones.
	TemplateRevision string
	// Rolling says that Cluster API is replacing machines that differ from the template.
	Rolling bool
	// OnDelete says that machines are replaced only after somebody removed them; otherwise Cluster API replaces them.
	OnDelete bool
	// CreatedAt is when the MachineDeployment was created.
	CreatedAt time.Time
	// Problems are everything that is wrong with the description: the machine's, the price's and the limits'.
	Problems []capacity.Problem
}

// ID returns the node group's id.
func (g NodeGroup) ID() string { return ID(g.Key) }

// ID returns the id of the node group of a MachineDeployment.
func ID(deployment types.NamespacedName) string { return deployment.Namespace + "/" + deployment.Name }

// ParseID returns the MachineDeployment of a node group's id.
func ParseID(id string) (types.NamespacedName, error) {
	namespace, name, found := strings.Cut(id, "/")
	if !found || namespace == "" || name == "" || strings.Contains(name, "/") {
		return types.NamespacedName{}, fmt.Errorf("%q is not <namespace>/<MachineDeployment name>", id)
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, nil
}

// IsMember reports whether a MachineDeployment has opted in to claims.
func IsMember(md *clusterv1.MachineDeployment) bool {
	_, member := md.Labels[v1alpha1.MemberLabel]
	return member
}

// Sources are what a MachineDeployment is examined with.
type Sources struct {
	// Cluster is its Cluster; nil means that it does not exist.
	Cluster *clusterv1.Cluster
	// Template is its infrastructure template.
	Template capacity.Template
	// Observed is what its Nodes showed.
	Observed capacity.Observation
	// SyncedLabels are the patterns of further labels that reach Nodes.
	SyncedLabels []*regexp.Regexp
	// Pricing says how prices are found.
	Pricing pricing.Policy
}

// Of examines a MachineDeployment. It reads only its arguments, changes none of them, and never fails.
func Of(md *clusterv1.MachineDeployment, from Sources) NodeGroup {
	g := NodeGroup{
		Key:               types.NamespacedName{Namespace: md.Namespace, Name: md.Name},
		Cluster:           types.NamespacedName{Namespace: md.Namespace, Name: md.Spec.ClusterName},
		Labels:            maps.Clone(md.Labels),
		Machine:           capacity.Describe(md, from.Template, from.Observed, from.SyncedLabels),
		Limits:            eligibility.Of(md, from.Cluster),
		KubernetesVersion: md.Spec.Template.Spec.Version,
		TemplateRevision:  revision(md),
		OnDelete:          md.Spec.Rollout.Strategy.Type == clusterv1.OnDeleteMachineDeploymentStrategyType,
		Rolling:           Rolling(md),
		CreatedAt:         md.CreationTimestamp.Time,
	}
	if ledger, err := protocol.LedgerOf(md); err == nil && ledger != nil {
		g.Floor = max(ledger.Floor, ledger.Min)
	} else if err == nil {
		g.Floor = g.Limits.Replicas // there is no claim yet
	}
	price, problems := from.Pricing.Of(md, g.Machine)
	g.Price = price
	g.Problems = append(g.Problems, g.Machine.Problems...)
	g.Problems = append(g.Problems, problems...)
	for _, p := range g.Limits.Problems {
		g.Problems = append(g.Problems, capacity.Problem{Field: p.Field, Value: p.Value, Message: p.Message})
	}
	return g
}

// Rolling reports whether Cluster API is replacing machines. With the strategy OnDelete it waits for somebody to remove them.
func Rolling(md *clusterv1.MachineDeployment) bool {
	return md.Spec.Rollout.Strategy.Type != clusterv1.OnDeleteMachineDeploymentStrategyType &&
		meta.IsStatusConditionTrue(md.Status.Conditions, clusterv1.MachineDeploymentRollingOutCondition)
}

// revision covers what Cluster API compares to tell whether a machine is up to date. Everything else changes in place.
func revision(md *clusterv1.MachineDeployment) string {
	return hash(compared(&md.Spec.Template.Spec), []byte(md.Spec.Rollout.After.UTC().String()))
}

// MachineRevision is the same for two templates that the same machines are made from, whether a MachineDeployment's or a
// MachineSet's.
func MachineRevision(template *clusterv1.MachineSpec) string { return hash(compared(template)) }

func compared(template *clusterv1.MachineSpec) []byte {
	text, err := json.Marshal(clusterv1.MachineSpec{
		Version: template.Version, Bootstrap: template.Bootstrap, InfrastructureRef: template.InfrastructureRef,
		FailureDomain: template.FailureDomain,
	})
	if err != nil {
		return nil // Strings always encode.
	}
	return text
}

func hash(parts ...[]byte) string {
	sum := fnv.New64a()
	for _, part := range parts {
		_, _ = sum.Write(part)
	}
	return fmt.Sprintf("%016x", sum.Sum64())
}
