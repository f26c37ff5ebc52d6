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

	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
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
	// KubernetesVersion is that of new machines; may be empty.
	KubernetesVersion string
	// TemplateRevision changes when new machines will differ from the present ones.
	TemplateRevision string
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

// Of examines a MachineDeployment. A nil cluster means that the Cluster does not exist. It reads only its arguments, keeps none
// of them, and never fails.
func Of(md *clusterv1.MachineDeployment, cluster *clusterv1.Cluster, template capacity.Template, syncedLabels []*regexp.Regexp) NodeGroup {
	g := NodeGroup{
		Key:               types.NamespacedName{Namespace: md.Namespace, Name: md.Name},
		Cluster:           types.NamespacedName{Namespace: md.Namespace, Name: md.Spec.ClusterName},
		Labels:            maps.Clone(md.Labels),
		Machine:           capacity.Describe(md, template, syncedLabels),
		Limits:            eligibility.Of(md, cluster),
		KubernetesVersion: md.Spec.Template.Spec.Version,
		TemplateRevision:  revision(md),
		OnDelete:          md.Spec.Rollout.Strategy.Type == clusterv1.OnDeleteMachineDeploymentStrategyType,
		CreatedAt:         md.CreationTimestamp.Time,
	}
	price, problem := pricing.Of(md, g.Machine)
	g.Price = price
	g.Problems = append(g.Problems, g.Machine.Problems...)
	if problem != nil {
		g.Problems = append(g.Problems, *problem)
	}
	for _, p := range g.Limits.Problems {
		g.Problems = append(g.Problems, capacity.Problem{Field: p.Field, Value: p.Value, Message: p.Message})
	}
	return g
}

// revision covers what Cluster API compares to tell whether a machine is up to date. Everything else changes in place.
func revision(md *clusterv1.MachineDeployment) string {
	spec := &md.Spec.Template.Spec
	text, err := json.Marshal(clusterv1.MachineSpec{
		Version: spec.Version, Bootstrap: spec.Bootstrap, InfrastructureRef: spec.InfrastructureRef, FailureDomain: spec.FailureDomain,
	})
	if err != nil {
		return "" // Strings always encode.
	}
	sum := fnv.New64a()
	_, _ = sum.Write(text)
	_, _ = sum.Write([]byte(md.Spec.Rollout.After.UTC().String()))
	return fmt.Sprintf("%016x", sum.Sum64())
}
