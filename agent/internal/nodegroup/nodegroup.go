// Package nodegroup describes MachineDeployments as node groups that machines can be claimed from.
package nodegroup

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"strings"
	"time"

	"github.com/samber/lo"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// NodeGroup is a MachineDeployment that machines can be claimed from.
type NodeGroup struct {
	// Key names the MachineDeployment, and Cluster its Cluster, which is in the same namespace.
	Key, Cluster types.NamespacedName
	// Labels are the labels of the MachineDeployment itself.
	Labels map[string]string
	// Machine describes the group's future machines.
	Machine capacity.Description
	// Price is the price of one machine.
	Price pricing.Price
	// Limits determine whether, and how many, machines may be claimed now.
	Limits eligibility.Group
	// Floor is how many of the replicas are the user's. It is 0 if the ledger cannot be read.
	Floor int32
	// Autoscaling are the options of the group for the cluster-autoscaler. They are only read where
	// the group is held by it.
	Autoscaling AutoscalingOptions
	// KubernetesVersion is the version of new machines. It may be empty.
	KubernetesVersion string
	// TemplateRevision changes when new machines will differ from the existing ones.
	TemplateRevision string
	// Rolling means that Cluster API is replacing machines that differ from the template.
	Rolling bool
	// OnDelete means that Cluster API replaces a machine only after another actor has removed it.
	// Otherwise Cluster API removes and replaces machines itself.
	OnDelete bool
	// CreatedAt is when the MachineDeployment was created.
	CreatedAt time.Time
	// Problems are all problems with the description: those of the machine, the price and the
	// limits.
	Problems []capacity.Problem
}

// ID returns the ID of the node group.
func (g NodeGroup) ID() string { return ID(g.Key) }

// ID returns the ID of a MachineDeployment's node group.
func ID(deployment types.NamespacedName) string { return deployment.Namespace + "/" + deployment.Name }

// ParseID returns the MachineDeployment that a node group's ID names.
func ParseID(id string) (types.NamespacedName, error) {
	namespace, name, found := strings.Cut(id, "/")
	if !found || namespace == "" || name == "" || strings.Contains(name, "/") {
		return types.NamespacedName{}, fmt.Errorf("%q is not <namespace>/<MachineDeployment name>", id)
	}
	// The API's pattern for candidates does not limit the lengths: it would take four times as long
	// to match.
	if len(namespace) > validation.DNS1123LabelMaxLength || len(name) > validation.DNS1123SubdomainMaxLength {
		return types.NamespacedName{}, fmt.Errorf("%q: a namespace has at most %d characters, and a MachineDeployment's name %d",
			id, validation.DNS1123LabelMaxLength, validation.DNS1123SubdomainMaxLength)
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, nil
}

// IsMember reports whether a MachineDeployment has opted in to claims.
func IsMember(md *clusterv1.MachineDeployment) bool {
	_, member := md.Labels[v1alpha1.MemberLabel]
	return member
}

// Sources are the inputs of [Of], in addition to the MachineDeployment.
type Sources struct {
	// Cluster is the MachineDeployment's Cluster, or nil if it does not exist.
	Cluster *clusterv1.Cluster
	// Template is the infrastructure template.
	Template capacity.Template
	// Learned is what the group's Nodes reported.
	Learned capacity.Learned
	// Settings are those of all node groups.
	Settings capacity.Settings
	// Pricing determines how prices are found.
	Pricing pricing.Policy
}

// Of describes a MachineDeployment as a node group. It only reads its arguments, and never fails.
func Of(md *clusterv1.MachineDeployment, from Sources) NodeGroup {
	g := NodeGroup{
		Key:               types.NamespacedName{Namespace: md.Namespace, Name: md.Name},
		Cluster:           types.NamespacedName{Namespace: md.Namespace, Name: md.Spec.ClusterName},
		Labels:            maps.Clone(md.Labels),
		Machine:           capacity.Describe(md, from.Template, from.Learned, from.Settings),
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
	if g.Limits.Holder == v1alpha1.ClusterAutoscaler {
		var unusable []capacity.Problem
		g.Autoscaling, unusable = autoscalingOptions(md.Annotations)
		g.Autoscaling.MaxNodeProvisionTime = lo.EmptyableToPtr(g.Limits.MaxNodeProvisionTime)
		g.Problems = append(g.Problems, unusable...)
	}
	g.Problems = append(g.Problems, g.Machine.Problems...)
	g.Problems = append(g.Problems, problems...)
	for _, p := range g.Limits.Problems {
		g.Problems = append(g.Problems, capacity.Problem{Field: p.Field, Value: p.Value, Message: p.Message})
	}
	return g
}

// Rolling reports whether Cluster API is replacing machines. It is false for the strategy OnDelete,
// where Cluster API waits until another actor removes them.
func Rolling(md *clusterv1.MachineDeployment) bool {
	return md.Spec.Rollout.Strategy.Type != clusterv1.OnDeleteMachineDeploymentStrategyType &&
		meta.IsStatusConditionTrue(md.Status.Conditions, clusterv1.MachineDeploymentRollingOutCondition)
}

// revision covers what Cluster API compares to determine whether a machine is up to date. All other
// fields change in place.
func revision(md *clusterv1.MachineDeployment) string {
	return hash(compared(&md.Spec.Template.Spec), []byte(md.Spec.Rollout.After.UTC().String()))
}

// MachineRevision returns the same value for two templates that produce the same machines. The
// template may be that of a MachineDeployment or a MachineSet.
func MachineRevision(template *clusterv1.MachineSpec) string { return hash(compared(template)) }

// InfrastructureRevision returns the same value for two templates whose machines have the same
// size: those with the same infrastructure template, which never changes.
func InfrastructureRevision(template *clusterv1.MachineSpec) string {
	ref := template.InfrastructureRef
	return hash([]byte(ref.APIGroup + "/" + ref.Kind + "/" + ref.Name))
}

func compared(template *clusterv1.MachineSpec) []byte {
	text, err := json.Marshal(clusterv1.MachineSpec{
		Version: template.Version, Bootstrap: template.Bootstrap, InfrastructureRef: template.InfrastructureRef,
		FailureDomain: template.FailureDomain,
	})
	if err != nil {
		return nil // strings always encode
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
