package fakeagent

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/reflection/grpc_reflection_v1alpha"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Role is a set of methods. The roles are those of the agent.
type Role string

const (
	// RoleCluster is the role of a Cluster's own shim.
	RoleCluster Role = "cluster"
	// RoleReader may read.
	RoleReader Role = "reader"
	// RoleAutoscaler may read, and create and release claims of autoscalers.
	RoleAutoscaler Role = "autoscaler"
	// RoleAdmin may do everything except request a Cluster's certificate.
	RoleAdmin Role = "admin"
	// RoleBootstrap may only request a Cluster's first certificate.
	RoleBootstrap Role = "bootstrap"
)

// Grant grants a role for some Clusters.
type Grant struct {
	Role Role
	// AllClusters grants the role for every Cluster. Otherwise, Clusters lists them as
	// <namespace>/<name>. In either part, `*` matches any characters.
	AllClusters bool
	Clusters    []string
}

func (g Grant) covers(cluster clusterKey) bool {
	return g.AllClusters || slices.ContainsFunc(g.Clusters, func(text string) bool {
		namespace, name, found := strings.Cut(text, "/")
		return found && like(namespace, cluster.namespace) && like(name, cluster.name)
	})
}

func like(pattern, name string) bool {
	matched, err := path.Match(pattern, name)
	return matched && err == nil
}

// Identity is the identity of a caller.
type Identity struct {
	// ID is a SPIFFE ID, which the agent uses as the caller's name.
	ID string
	// Grants are the roles of the caller.
	Grants []Grant
}

// Rule determines who may call a method. A method without a rule cannot be called.
type Rule struct {
	// Anyone allows every connection, Everyone every identity.
	Anyone, Everyone bool
	// Roles are allowed for the Cluster that the request names.
	Roles []Role
	// OfAnyCluster means that the request names no Cluster, and that the answer is about those that
	// the role is granted for.
	OfAnyCluster bool
	// AsHolder means that the request names the holder that the caller acts as.
	AsHolder bool
}

// OfCluster reports whether the request names a Cluster that the role must be granted for.
func (r Rule) OfCluster() bool { return len(r.Roles) > 0 && !r.OfAnyCluster }

// Rules returns the rule of every served method, by its full name. They are equal to the agent's
// rules, which a test of the agent verifies.
func Rules() map[string]Rule {
	readers := []Role{RoleCluster, RoleReader, RoleAutoscaler, RoleAdmin}
	return map[string]Rule{
		agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName:  {Roles: readers},
		agentv1alpha1.NodeGroupService_GetNodeGroup_FullMethodName:    {Roles: readers},
		agentv1alpha1.NodeGroupService_WatchNodeGroups_FullMethodName: {Roles: readers},

		agentv1alpha1.ClaimService_CreateClaim_FullMethodName:   {Roles: claimers(), AsHolder: true},
		agentv1alpha1.ClaimService_ReleaseClaim_FullMethodName:  {Roles: claimers()},
		agentv1alpha1.ClaimService_ReturnMachine_FullMethodName: {Roles: claimers()},
		agentv1alpha1.ClaimService_SyncClaims_FullMethodName:    {Roles: claimers(), AsHolder: true},
		agentv1alpha1.ClaimService_GetClaim_FullMethodName:      {Roles: readers},
		agentv1alpha1.ClaimService_ListClaims_FullMethodName:    {Roles: readers},
		agentv1alpha1.ClaimService_WatchClaims_FullMethodName:   {Roles: readers},

		agentv1alpha1.MachineService_GetMachine_FullMethodName:    {Roles: readers},
		agentv1alpha1.MachineService_ListMachines_FullMethodName:  {Roles: readers},
		agentv1alpha1.MachineService_WatchMachines_FullMethodName: {Roles: readers},

		agentv1alpha1.ClusterService_ListClusters_FullMethodName:  {Roles: readers, OfAnyCluster: true},
		agentv1alpha1.ClusterService_WatchClusters_FullMethodName: {Roles: readers, OfAnyCluster: true},

		agentv1alpha1.NodePoolService_ListPublishedObjects_FullMethodName:  {Roles: readers},
		agentv1alpha1.NodePoolService_WatchPublishedObjects_FullMethodName: {Roles: readers},
		agentv1alpha1.NodePoolService_ReportNodePools_FullMethodName:       {Roles: []Role{RoleCluster}},

		agentv1alpha1.CertificateService_IssueCertificate_FullMethodName: {Roles: []Role{RoleCluster, RoleBootstrap}},

		agentv1alpha1.StatusService_GetStatus_FullMethodName: {Everyone: true},

		grpc_health_v1.Health_Check_FullMethodName: {Anyone: true},
		grpc_health_v1.Health_List_FullMethodName:  {Anyone: true},
		grpc_health_v1.Health_Watch_FullMethodName: {Anyone: true},

		grpc_reflection_v1.ServerReflection_ServerReflectionInfo_FullMethodName:      {Everyone: true},
		grpc_reflection_v1alpha.ServerReflection_ServerReflectionInfo_FullMethodName: {Everyone: true},
	}
}

// claimers returns the roles that create and release claims.
func claimers() []Role { return []Role{RoleCluster, RoleAutoscaler, RoleAdmin} }

// shimHolder is the holder of the Cluster's own identity. Only it reports Nodes.
const shimHolder = "karpenter"

// MayActAs reports whether the role may act as the holder: create claims under its name, and
// collect and release its claims.
func (r Role) MayActAs(holder string) bool {
	switch r {
	case RoleCluster:
		return holder == shimHolder || holder == unknownHolder
	case RoleAutoscaler:
		return holder == "cluster-autoscaler" || strings.HasPrefix(holder, "cluster-autoscaler-")
	case RoleAdmin:
		return true
	default:
		return false
	}
}

// mayCall reports whether the caller may call the method for any Cluster.
func (i identity) mayCall(rule Rule) bool {
	return rule.Anyone || rule.Everyone ||
		slices.ContainsFunc(i.grants, func(g Grant) bool { return slices.Contains(rule.Roles, g.Role) })
}

func (i identity) mayCallFor(rule Rule, cluster clusterKey) bool {
	return slices.ContainsFunc(i.grants, func(g Grant) bool { return slices.Contains(rule.Roles, g.Role) && g.covers(cluster) })
}

// seesAll reports whether the caller has a role for every Cluster. Such a caller may also learn
// which Clusters do not exist.
func (i identity) seesAll() bool {
	return slices.ContainsFunc(i.grants, func(g Grant) bool { return g.AllClusters })
}

// mayActAs reports whether the caller may create, collect and release claims of the holder.
func (i identity) mayActAs(cluster clusterKey, holder string) bool {
	return slices.ContainsFunc(i.grants, func(g Grant) bool { return g.covers(cluster) && g.Role.MayActAs(holder) })
}

// Validate returns an error if the grant is invalid.
func (g Grant) Validate() error {
	switch g.Role {
	case RoleReader, RoleAutoscaler, RoleAdmin, RoleCluster, RoleBootstrap:
	default:
		return fmt.Errorf("role: %q is not one of reader, autoscaler, admin, cluster, bootstrap", g.Role)
	}
	if g.AllClusters == (len(g.Clusters) > 0) {
		return errors.New("clusters: name at least one <namespace>/<name>, or set allClusters, but not both")
	}
	for i, text := range g.Clusters {
		namespace, name, found := strings.Cut(text, "/")
		if !found || namespace == "" || name == "" || strings.Contains(name, "/") {
			return fmt.Errorf("clusters[%d]: %q is not <namespace>/<name>; * stands for any characters of either", i, text)
		}
		if _, err := path.Match(text, ""); err != nil {
			return fmt.Errorf("clusters[%d]: %q: %w", i, text, err)
		}
	}
	return nil
}
