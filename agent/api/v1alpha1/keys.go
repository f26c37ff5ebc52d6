package v1alpha1

// FieldManager names the agent in managed fields.
const FieldManager = "karpenter-capi-agent"

const (
	// OnboardingLabel on a Cluster is the id of its onboarding: of the Cluster's own certificates, only those that name it are accepted.
	// `capi-agent onboard` writes it. Who takes it off ends them. It goes along in a move and a restore, and is not on a Cluster that is made
	// again.
	OnboardingLabel = Group + "/onboarding"
	// Offboarded is the value of the label on a Cluster none of whose own certificates is accepted.
	Offboarded = "none"

	// MemberLabel on a MachineDeployment opts it in to claims; its value does not matter. The same key that
	// karpenter-provider-cluster-api uses.
	MemberLabel = "node.cluster.x-k8s.io/karpenter-member"

	// HolderAnnotation on a MachineDeployment names the holder whose claims alone the node group takes. Without it, the group is Karpenter's,
	// and open to every holder of the agent's own API.
	HolderAnnotation = Group + "/holder"
	// ClusterAutoscaler is the holder of the claims of a cluster-autoscaler that uses the agent as its cloud provider. It gets the node groups
	// that name it, and no others.
	ClusterAutoscaler = "cluster-autoscaler"

	// MaxNodeProvisionTimeAnnotation on a MachineDeployment is how long a claim waits for its Machine's provider ID and Node, as a Go
	// duration. The same key that cluster-autoscaler's provider for Cluster API reads.
	MaxNodeProvisionTimeAnnotation = "cluster.x-k8s.io/autoscaling-options-maxnodeprovisiontime"

	// KeepFailedAnnotation on a MachineDeployment is how long Machines of failed claims are kept for debugging, as a Go duration; at most
	// three at a time. Each keeps its replica.
	KeepFailedAnnotation = Group + "/keep-failed-machines"

	// LedgerAnnotation on a MachineDeployment holds what is in flight there: the ledger of package protocol, as JSON.
	LedgerAnnotation = Group + "/ledger"

	// ClaimedAnnotation on a MachineDeployment is how many of its replicas are claimed, as of the last write of the ledger, in which it is
	// written: an admission policy refuses to lower spec.replicas below it.
	ClaimedAnnotation = Group + "/claimed"

	// ReplicasLoweredAnnotation on a MachineDeployment says that another writer set spec.replicas below what is claimed, or wrote one number
	// again and again, who that is, and what to change. The agent writes it; the node group is frozen for as long as it is there, and a
	// person removes it.
	ReplicasLoweredAnnotation = Group + "/replicas-lowered"

	// ClaimLabel on a Machine holds the id of the claim that the machine is bound to. It is written once, when unset, and
	// taken off only by a hand-over.
	ClaimLabel = Group + "/claim"
	// ClaimNameAnnotation on a Machine holds the claim's display name (the NodeClaim's name), for people.
	ClaimNameAnnotation = Group + "/claim-name"
	// ClaimNameLabel on a Machine holds the same, where it can be a label's value, so that
	// `kubectl get machines -L agent.karpenter.cluster.x-k8s.io/claim-name` shows it.
	ClaimNameLabel = ClaimNameAnnotation
	// ClaimHolderAnnotation on a Machine holds the claim's holder, so that a lost MachineClaim can be made again.
	ClaimHolderAnnotation = Group + "/claim-holder"
	// ClaimSpokeAnnotation on a Machine holds the cluster that the claim was made from, for the same reason.
	ClaimSpokeAnnotation = Group + "/claim-spoke"
	// ClaimedAtAnnotation on a Machine holds the time at which it was bound, RFC 3339, for people.
	ClaimedAtAnnotation = Group + "/claimed-at"

	// HandedOverAnnotation on a Machine holds the id of the claim that last gave it up before it had a Node. As no id is used
	// twice, it tells a Machine that was never claimed from one that was meanwhile.
	HandedOverAnnotation = Group + "/handed-over-by"

	// NodeRegisteredAtAnnotation on a Machine that no claim of the reporting holder has is when that holder first reported the
	// Machine's Node as registered, RFC 3339: pods may run on it, whatever Cluster API has seen. Set once. A claim keeps the same in
	// its status.
	NodeRegisteredAtAnnotation = Group + "/node-registered-at"

	// FloorAnnotation marks a Machine as one of the floor's: no claim is promised it unless it adopts it, and the shim takes Karpenter's taint
	// off its Node, so that pods may run there. It is written once the ledger has excluded the Machine from what claims may have, and
	// taken off by a claim's label. Where the floor has become smaller than the number of marks, the oldest Machines count.
	FloorAnnotation = Group + "/floor"
	// FloorReturned is the annotation's value on a Machine that a claim has returned to the user.
	FloorReturned = "returned"

	// ReleaseFinalizer holds a Machine whose instance is gone until its replica has been given back. It is added only when
	// the Machine is being released, never to a live one.
	ReleaseFinalizer = Group + "/release"
	// ReleaseHook is a pre-terminate hook that earlier versions of the agent put on Machines that others delete. It is only taken off.
	ReleaseHook = "pre-terminate.delete.hook.machine.cluster.x-k8s.io/karpenter-capi"
	// PausedByAgent is the value of Cluster API's paused annotation where the agent set it. Any other value is a person's,
	// and is left alone.
	PausedByAgent = Group

	// ReleasedAnnotation on a MachineSet holds the UIDs of the Machines that it was last lowered for while its
	// MachineDeployment was paused, comma-separated; written together with its replicas, so that the step can be repeated.
	ReleasedAnnotation = Group + "/released"

	// MaxClaimsAnnotation on a Cluster replaces, for that Cluster, the agent's flag --max-claims-per-cluster. The value is a whole number; 0
	// disables the limit. With any other value the flag applies.
	MaxClaimsAnnotation = Group + "/max-claims"
	// MaxCreationsAnnotation is the same for --max-creations-per-minute.
	MaxCreationsAnnotation = Group + "/max-creations-per-minute"
	// MaxReleasesAnnotation is the same for --max-releases-per-window.
	MaxReleasesAnnotation = Group + "/max-releases-per-window"

	// ClusterLabel on a MachineClaim holds the name of its Cluster.
	ClusterLabel = Group + "/cluster"
	// NodeGroupLabel on a MachineClaim holds the name of the MachineDeployment that it claims from.
	NodeGroupLabel = Group + "/node-group"
	// HolderLabel on a MachineClaim holds its holder.
	HolderLabel = Group + "/holder"

	// RequestIDAnnotation on a MachineClaim holds the request id of the CreateClaim call that made it, under which both sides log the call.
	RequestIDAnnotation = Group + "/request-id"
	// TraceIDAnnotation on a MachineClaim holds the id of the trace of that call, if the agent recorded one, in hexadecimal.
	TraceIDAnnotation = Group + "/trace-id"
)
