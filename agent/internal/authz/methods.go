package authz

import (
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/reflection/grpc_reflection_v1alpha"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// Rule specifies who may call a method.
type Rule struct {
	// Anyone allows every caller, with or without an identity, unless its certificate is denied.
	Anyone bool
	// Everyone allows every identity, whatever its roles.
	Everyone bool
	// Roles are the roles that may call.
	Roles []Role
	// OfCluster means that the request names a Cluster, and that the role must have been granted
	// for it.
	OfCluster bool
	// OneCluster means that the request names no Cluster: it is for the only one that the caller
	// was granted one of the roles for; see [Caller.OnlyCluster].
	OneCluster bool
	// OfAnyCluster means that the request names no Cluster, and that the response holds those that
	// the caller was granted one of the roles for.
	OfAnyCluster bool
	// AsHolder means that the request names the holder that the caller acts as. One of the caller's
	// roles must allow this holder; see [Holders].
	AsHolder bool
	// AsksOnboarding means that the method itself looks whether the onboarding has ended that the
	// caller's certificate belongs to. Callers of all other methods are refused if it has.
	AsksOnboarding bool
}

var (
	readers  = []Role{RoleCluster, RoleReader, RoleAutoscaler, RoleAdmin}
	claimers = []Role{RoleCluster, RoleAutoscaler, RoleAdmin}

	// autoscaler is the rule of the cluster-autoscaler's protocol, whose requests name no Cluster.
	autoscaler = Rule{Roles: []Role{RoleAutoscaler}, OneCluster: true}
)

// Methods has a rule for the full name of every served method. Other methods are rejected.
var Methods = map[string]Rule{
	agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName:  {Roles: readers, OfCluster: true},
	agentv1alpha1.NodeGroupService_GetNodeGroup_FullMethodName:    {Roles: readers, OfCluster: true},
	agentv1alpha1.NodeGroupService_WatchNodeGroups_FullMethodName: {Roles: readers, OfCluster: true},

	agentv1alpha1.ClaimService_CreateClaim_FullMethodName:   {Roles: claimers, OfCluster: true, AsHolder: true},
	agentv1alpha1.ClaimService_ReleaseClaim_FullMethodName:  {Roles: claimers, OfCluster: true},
	agentv1alpha1.ClaimService_ReturnMachine_FullMethodName: {Roles: claimers, OfCluster: true},
	agentv1alpha1.ClaimService_SyncClaims_FullMethodName:    {Roles: claimers, OfCluster: true, AsHolder: true},
	agentv1alpha1.ClaimService_GetClaim_FullMethodName:      {Roles: readers, OfCluster: true},
	agentv1alpha1.ClaimService_ListClaims_FullMethodName:    {Roles: readers, OfCluster: true},
	agentv1alpha1.ClaimService_WatchClaims_FullMethodName:   {Roles: readers, OfCluster: true},

	agentv1alpha1.MachineService_GetMachine_FullMethodName:    {Roles: readers, OfCluster: true},
	agentv1alpha1.MachineService_ListMachines_FullMethodName:  {Roles: readers, OfCluster: true},
	agentv1alpha1.MachineService_WatchMachines_FullMethodName: {Roles: readers, OfCluster: true},

	agentv1alpha1.ClusterService_ListClusters_FullMethodName:  {Roles: readers, OfAnyCluster: true},
	agentv1alpha1.ClusterService_WatchClusters_FullMethodName: {Roles: readers, OfAnyCluster: true},

	agentv1alpha1.NodePoolService_ListPublishedObjects_FullMethodName:  {Roles: readers, OfCluster: true},
	agentv1alpha1.NodePoolService_WatchPublishedObjects_FullMethodName: {Roles: readers, OfCluster: true},
	// Only the spoke knows its NodePools.
	agentv1alpha1.NodePoolService_ReportNodePools_FullMethodName: {Roles: []Role{RoleCluster}, OfCluster: true},

	// Administrators are not listed: they have no identity of a Cluster to be signed. It reads the
	// onboarding from the API server, as the caches may be behind.
	agentv1alpha1.CertificateService_IssueCertificate_FullMethodName: {
		Roles: []Role{RoleCluster, RoleBootstrap}, OfCluster: true, AsksOnboarding: true,
	},

	externalgrpc.CloudProvider_NodeGroups_FullMethodName:                  autoscaler,
	externalgrpc.CloudProvider_NodeGroupForNode_FullMethodName:            autoscaler,
	externalgrpc.CloudProvider_PricingNodePrice_FullMethodName:            autoscaler,
	externalgrpc.CloudProvider_PricingPodPrice_FullMethodName:             autoscaler,
	externalgrpc.CloudProvider_GPULabel_FullMethodName:                    autoscaler,
	externalgrpc.CloudProvider_GetAvailableGPUTypes_FullMethodName:        autoscaler,
	externalgrpc.CloudProvider_Cleanup_FullMethodName:                     autoscaler,
	externalgrpc.CloudProvider_Refresh_FullMethodName:                     autoscaler,
	externalgrpc.CloudProvider_NodeGroupTargetSize_FullMethodName:         autoscaler,
	externalgrpc.CloudProvider_NodeGroupIncreaseSize_FullMethodName:       autoscaler,
	externalgrpc.CloudProvider_NodeGroupDeleteNodes_FullMethodName:        autoscaler,
	externalgrpc.CloudProvider_NodeGroupDecreaseTargetSize_FullMethodName: autoscaler,
	externalgrpc.CloudProvider_NodeGroupNodes_FullMethodName:              autoscaler,
	externalgrpc.CloudProvider_NodeGroupTemplateNodeInfo_FullMethodName:   autoscaler,
	externalgrpc.CloudProvider_NodeGroupGetOptions_FullMethodName:         autoscaler,

	// It reports to a caller whose onboarding has ended that it has no rights.
	agentv1alpha1.StatusService_GetStatus_FullMethodName: {Everyone: true, AsksOnboarding: true},

	grpc_health_v1.Health_Check_FullMethodName: {Anyone: true},
	grpc_health_v1.Health_List_FullMethodName:  {Anyone: true},
	grpc_health_v1.Health_Watch_FullMethodName: {Anyone: true},

	grpc_reflection_v1.ServerReflection_ServerReflectionInfo_FullMethodName:      {Everyone: true},
	grpc_reflection_v1alpha.ServerReflection_ServerReflectionInfo_FullMethodName: {Everyone: true},
}
