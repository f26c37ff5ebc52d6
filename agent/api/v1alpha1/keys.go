package v1alpha1

// FieldManager names the agent in managed fields.
const FieldManager = "karpenter-capi-agent"

const (
	// OnboardingLabel on a Cluster is the id of its onboarding. Of the Cluster's own certificates,
	// the agent accepts only those that name this id. `capi-agent onboard` sets the label; removing
	// it revokes these certificates. A move or a restore of the Cluster keeps it. A Cluster that is
	// created again does not have it.
	//
	// On a Spoke it is the onboarding whose bootstrap certificate may be used, which `capi-agent
	// onboard` writes before it sets the Cluster's label. A Spoke that was deleted and made again
	// does not have it, so the record of the certificate's use cannot be lost with the Spoke.
	OnboardingLabel = Group + "/onboarding"
	// Offboarded is the label's value on a Cluster whose own certificates are all rejected.
	Offboarded = "none"

	// MemberLabel on a MachineDeployment opts it in to claims; its value does not matter.
	// karpenter-provider-cluster-api uses the same key.
	MemberLabel = "node.cluster.x-k8s.io/karpenter-member"

	// HolderAnnotation on a MachineDeployment names the only holder whose claims the node group
	// accepts. Without it, the group is Karpenter's, and open to every holder of the agent's own
	// API.
	HolderAnnotation = Group + "/holder"
	// ClusterAutoscaler is the holder of the claims of a cluster-autoscaler that uses the agent as
	// its cloud provider. It gets the node groups that name it, and no others.
	ClusterAutoscaler = "cluster-autoscaler"

	// MaxNodeProvisionTimeAnnotation on a MachineDeployment is how long a claim waits for its
	// Machine's provider ID and Node, as a Go duration. The cluster-autoscaler's provider for
	// Cluster API reads the same key.
	MaxNodeProvisionTimeAnnotation = "cluster.x-k8s.io/autoscaling-options-maxnodeprovisiontime"

	// KeepFailedAnnotation on a MachineDeployment is how long Machines of failed claims are kept
	// for debugging, as a Go duration; at most three at a time. Each keeps its replica.
	KeepFailedAnnotation = Group + "/keep-failed-machines"

	// LedgerAnnotation on a MachineDeployment holds its ledger as JSON; see package protocol.
	LedgerAnnotation = Group + "/ledger"

	// ClaimedAnnotation on a MachineDeployment is how many of its replicas are claimed. It is
	// written together with the ledger. An admission policy rejects writes that lower spec.replicas
	// below it.
	ClaimedAnnotation = Group + "/claimed"

	// ReplicasLoweredAnnotation on a MachineDeployment records that another writer set
	// spec.replicas below what is claimed, or repeatedly wrote the same number. It names the writer
	// and what to change. The agent sets it; the node group is frozen until a person removes it.
	ReplicasLoweredAnnotation = Group + "/replicas-lowered"

	// ClaimLabel on a Machine holds the id of the claim that the machine is bound to. It is set
	// only if unset, and removed only by a hand-over or a return.
	ClaimLabel = Group + "/claim"
	// ClaimNameAnnotation on a Machine holds the claim's display name (the NodeClaim's name).
	ClaimNameAnnotation = Group + "/claim-name"
	// ClaimNameLabel on a Machine holds the same, if it is a valid label value, so that `kubectl
	// get machines -L agent.karpenter.cluster.x-k8s.io/claim-name` shows it.
	ClaimNameLabel = ClaimNameAnnotation
	// ClaimHolderAnnotation on a Machine holds the claim's holder, so that a lost MachineClaim can
	// be created again.
	ClaimHolderAnnotation = Group + "/claim-holder"
	// ClaimSpokeAnnotation on a Machine holds the cluster from which the claim was created, for the
	// same reason.
	ClaimSpokeAnnotation = Group + "/claim-spoke"
	// ClaimedAtAnnotation on a Machine holds the time at which it was bound, RFC 3339, for display.
	ClaimedAtAnnotation = Group + "/claimed-at"

	// HandedOverAnnotation on a Machine holds the id of the last claim that was released and left
	// the Machine to the next claim. Ids are never reused, so the annotation distinguishes a
	// Machine that was never claimed from one that was claimed in the meantime.
	HandedOverAnnotation = Group + "/handed-over-by"

	// NodeRegisteredAtAnnotation on a Machine is when a holder that has no claim on the Machine
	// first reported its Node as registered, RFC 3339: pods may run on it, whatever Cluster API
	// reports. Set once. For a claimed Machine, the status of the MachineClaim holds this time.
	NodeRegisteredAtAnnotation = Group + "/node-registered-at"

	// FloorAnnotation marks a Machine as part of the floor: only a claim that adopts the Machine
	// gets it, and the shim removes Karpenter's taint from its Node, so that pods may run there. It
	// is set after the ledger has excluded the Machine from what claims may get, and removed when
	// the Machine gets a claim's label. If the floor has become smaller than the number of marked
	// Machines, the oldest of them count.
	FloorAnnotation = Group + "/floor"
	// FloorReturned is the annotation's value on a Machine that a claim has returned to the user.
	FloorReturned = "returned"

	// ReleaseFinalizer keeps a Machine whose instance is gone until replicas have been decremented
	// for it. It is added only to a Machine that is being released.
	ReleaseFinalizer = Group + "/release"
	// ReleaseHook is a pre-terminate hook that earlier versions of the agent added to Machines that
	// another actor deletes. This version only removes it.
	ReleaseHook = "pre-terminate.delete.hook.machine.cluster.x-k8s.io/karpenter-capi"
	// PausedByAgent is the value of Cluster API's paused annotation that the agent sets. The agent
	// does not change the annotation if it has any other value.
	PausedByAgent = Group

	// ReleasedAnnotation on a MachineSet holds the comma-separated UIDs of the Machines for which
	// its replicas were last decremented while its MachineDeployment was paused. It is written
	// together with the replicas, so that the step can be repeated.
	ReleasedAnnotation = Group + "/released"

	// MaxClaimsAnnotation on a Cluster replaces, for that Cluster, the agent's flag
	// --max-claims-per-cluster. The value is a whole number; 0 disables the limit. With any other
	// value the flag applies.
	MaxClaimsAnnotation = Group + "/max-claims"
	// MaxCreationsAnnotation is the same for --max-creations-per-minute.
	MaxCreationsAnnotation = Group + "/max-creations-per-minute"
	// MaxReleasesAnnotation is the same for --max-releases-per-window.
	MaxReleasesAnnotation = Group + "/max-releases-per-window"

	// ResourcesAnnotation on a MachineDeployment lists extended resources of its machines, and huge
	// pages, for which cluster-autoscaler has no annotation:
	// `example.com/fpga=2,hugepages-2Mi=1Gi`. Users write it.
	ResourcesAnnotation = Group + "/resources"

	// ClusterLabel on a MachineClaim holds the name of its Cluster.
	ClusterLabel = Group + "/cluster"
	// NodeGroupLabel on a MachineClaim holds the name of the MachineDeployment that it claims from.
	NodeGroupLabel = Group + "/node-group"
	// HolderLabel on a MachineClaim holds its holder.
	HolderLabel = Group + "/holder"

	// RequestIDAnnotation on a MachineClaim holds the request id of the CreateClaim call that
	// created it. Both sides log the call with this id.
	RequestIDAnnotation = Group + "/request-id"
	// TraceIDAnnotation on a MachineClaim holds the id of the trace of that call, if the agent
	// recorded one, in hexadecimal.
	TraceIDAnnotation = Group + "/trace-id"
)
