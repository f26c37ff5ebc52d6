package agent_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

var (
	footprintMachines = flag.Int("machines", 400, "how many Machines, each with its claim, the agent's footprint is measured with")
	footprintEnded    = flag.Int("ended", 400, "how many claims that have ended the agent's footprint is measured with")
	footprintRounds   = flag.Int("rounds", 1, "how often the agent is started on each")
	footprintAgainst  = flag.String("against", "", "another build of this test, whose agents are started in turn with this one's; empty for none")
	footprintProfiles = flag.String("profiles", "", "folder for heap profiles of the agents whose footprint is measured; empty for none")
)

const (
	// These limit the agent's heap for each Machine with its claim, and for each ended claim. They
	// include a share of the MachineDeployment, MachineSet, Cluster and template, which 50 Machines
	// share.
	maxHeapPerMachine = 9 << 10
	maxHeapPerEnded   = 5 << 10

	machinesPerGroup = 50
)

// TestFootprint starts agents, each in its own process: on an empty hub, on one with Machines that
// all have claims, and on one with ended claims. It checks the difference in live heap per object,
// which does not depend on the machine. Durations and system memory are only logged.
func TestFootprint(t *testing.T) {
	nothing, machines, ended := plane.Namespace(t), plane.Namespace(t), plane.Namespace(t)
	size := settle(t, *footprintMachines, machines)
	t.Logf("a Machine has %d bytes as JSON, %d of them managed fields; a bound claim %d, %d of them",
		size.machine, size.machineManaged, size.claim, size.claimManaged)
	endedGroups(t, ended, *footprintEnded)
	before := versions(t, machines)

	for round := range *footprintRounds {
		if *footprintAgainst != "" {
			for _, namespace := range []string{nothing, machines, ended} {
				f := measure(t, *footprintAgainst, namespace, "against")
				t.Logf("against: complete after %.2f s, processor %.2f s, heap %.1f MiB, resident %.0f MiB, at most %.0f MiB",
					f.Complete.Seconds(), f.Processor.Seconds(), mib(f.Heap), mib(f.Resident), mib(f.Peak))
			}
		}
		none := measure(t, os.Args[0], nothing, fmt.Sprint("nothing-", round))
		for _, on := range []struct {
			what, namespace string
			objects         int
			bound           float64
		}{
			{"Machines with a claim each", machines, *footprintMachines, maxHeapPerMachine},
			{"ended claims", ended, *footprintEnded, maxHeapPerEnded},
		} {
			f := measure(t, os.Args[0], on.namespace, fmt.Sprint(on.what, "-", round))
			each := (float64(f.Heap) - float64(none.Heap)) / float64(on.objects)
			t.Logf("%d %s: complete after %.2f s (with nothing %.2f s), processor %.2f s (%.2f s), heap %.1f MiB, %.1f KiB each, "+
				"resident %.0f MiB, at most %.0f MiB (%.0f MiB)",
				on.objects, on.what, f.Complete.Seconds(), none.Complete.Seconds(), f.Processor.Seconds(), none.Processor.Seconds(),
				mib(f.Heap), each/1024, mib(f.Resident), mib(f.Peak), mib(none.Peak))
			if each > on.bound {
				t.Errorf("each of %d %s takes %.1f KiB of the agent's heap; at most %.1f KiB", on.objects, on.what, each/1024, on.bound/1024)
			}
		}
	}
	require.Equal(t, before, versions(t, machines), "an agent that starts writes nothing where nothing is to be done")
}

func mib(bytes uint64) float64 { return float64(bytes) / (1 << 20) }

// footprint is what an agent's process reports about itself.
type footprint struct {
	// Complete is the time from the start of the process until the agent's view of the hub was
	// complete.
	Complete time.Duration `json:"complete"`
	// Processor is the CPU time used when the process came to rest.
	Processor time.Duration `json:"processor"`
	// Heap is the live heap at rest.
	Heap uint64 `json:"heap"`
	// Resident is the resident memory at rest, and Peak its maximum. They are zero if the system
	// does not report them.
	Resident uint64 `json:"resident"`
	Peak     uint64 `json:"peak"`
}

// agentProcess is the environment variable with the namespace that a process of this test binary
// serves as an agent.
const agentProcess = "AGENT_TEST_PROCESS"

// measure starts an agent for a namespace, as a process of the given build of this test.
func measure(t *testing.T, build, namespace, name string) footprint {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(kubeconfig, plane.KubeConfig(), 0o600))
	profile := ""
	if *footprintProfiles != "" {
		profile = filepath.Join(*footprintProfiles, regexp.MustCompile(`\W+`).ReplaceAllString(name, "-")+".heap")
	}
	command := exec.CommandContext(t.Context(), build, kubeconfig, profile)
	command.Env = append(os.Environ(), agentProcess+"="+namespace)
	var out bytes.Buffer
	command.Stdout, command.Stderr = &out, t.Output()
	require.NoError(t, command.Run())
	var f footprint
	require.NoError(t, json.Unmarshal(out.Bytes(), &f), out.String())
	return f
}

// runAgentProcess is the process that [measure] starts.
func runAgentProcess(begun time.Time, namespace, kubeconfig, profile string, out io.Writer) error {
	if profile != "" {
		runtime.MemProfileRate = 64 << 10
		file, err := os.Create(profile + ".cpu")
		if err != nil {
			return err
		}
		if err := pprof.StartCPUProfile(file); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	hub, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	o := testOptions(namespace)
	o.KubeAPIQPS, o.KubeAPIBurst = options.New().KubeAPIQPS, options.New().KubeAPIBurst
	a, err := agent.New(ctx, agent.Config{Options: o, Hub: hub})
	if err != nil {
		return err
	}
	listener, err := server.ListenLoopback(ctx, net.JoinHostPort("127.0.0.1", "0"))
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx, listener) }()
	var f footprint
	if err := wait.PollUntilContextTimeout(ctx, 5*time.Millisecond, 5*time.Minute, true, func(context.Context) (bool, error) {
		return a.Synced(), nil
	}); err != nil {
		return fmt.Errorf("waiting for the view: %w", err)
	}
	f.Complete = time.Since(begun)
	// At rest, the controllers' queues are processed, and the memory for that is free.
	var last time.Duration
	err = wait.PollUntilContextTimeout(ctx, 500*time.Millisecond, 5*time.Minute, true, func(context.Context) (bool, error) {
		used := processorTime()
		atRest := last > 0 && used-last < 20*time.Millisecond
		last = used
		return atRest, nil
	})
	if err != nil {
		return fmt.Errorf("waiting for rest: %w", err)
	}
	f.Processor = last
	f.Resident, f.Peak = resident()
	var memory runtime.MemStats
	runtime.GC()
	runtime.GC() // sweeps what the first collection found to be free
	runtime.ReadMemStats(&memory)
	f.Heap = memory.HeapAlloc
	if profile != "" {
		file, err := os.Create(profile)
		if err != nil {
			return err
		}
		if err := errors.Join(pprof.WriteHeapProfile(file), file.Close()); err != nil {
			return err
		}
	}
	cancel()
	return errors.Join(<-ended, json.NewEncoder(out).Encode(f))
}

func processorTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

var memoryLines = regexp.MustCompile(`(?m)^(VmRSS|VmHWM):\s+(\d+) kB$`)

// resident returns the current and the maximum resident memory, if the system reports them.
func resident() (now, peak uint64) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, 0
	}
	for _, line := range memoryLines.FindAllSubmatch(status, -1) {
		kib, err := strconv.ParseUint(string(line[2]), 10, 64)
		switch {
		case err != nil:
		case string(line[1]) == "VmRSS":
			now = kib << 10
		default:
			peak = kib << 10
		}
	}
	return now, peak
}

type sizes struct{ machine, machineManaged, claim, claimManaged int }

// settle creates Clusters at rest, each with one node group of running Machines with claims. The
// objects look like Cluster API's in a real hub, with its controllers' status and managed fields.
// The Clusters are distributed over the namespaces.
func settle(t *testing.T, machines int, namespaces ...string) sizes {
	t.Helper()
	var measured sizes
	for first := 0; first < machines; first += machinesPerGroup {
		replicas := min(machinesPerGroup, machines-first)
		number := first / machinesPerGroup
		cluster, md, set := makeGroup(t, namespaces[number%len(namespaces)], number, replicas)
		var writes errgroup.Group
		writes.SetLimit(32)
		for i := range replicas {
			writes.Go(func() error {
				machine := machineOf(set, i)
				if err := runMachine(t.Context(), machine); err != nil {
					return err
				}
				claim, err := madeClaim(t.Context(), cluster, md, machine, i, false)
				if first+i == 0 {
					measured.machine, measured.machineManaged = jsonSize(t, machine)
					measured.claim, measured.claimManaged = jsonSize(t, claim)
				}
				return err
			})
		}
		require.NoError(t, writes.Wait())
	}
	return measured
}

// endedGroups creates ended claims, on node groups that no longer have Machines.
func endedGroups(t *testing.T, namespace string, claims int) {
	t.Helper()
	for first := 0; first < claims; first += machinesPerGroup {
		cluster, md, set := makeGroup(t, namespace, first/machinesPerGroup, 0)
		var writes errgroup.Group
		writes.SetLimit(32)
		for i := range min(machinesPerGroup, claims-first) {
			writes.Go(func() error {
				_, err := madeClaim(t.Context(), cluster, md, machineOf(set, i), i, true)
				return err
			})
		}
		require.NoError(t, writes.Wait())
	}
}

func clusterName(number int) string { return fmt.Sprintf("team-%03d-production", number) }

func groupName(cluster string) string { return cluster + "-workers-a" }

func makeGroup(
	t *testing.T, namespace string, number, replicas int,
) (*clusterv1.Cluster, *clusterv1.MachineDeployment, *clusterv1.MachineSet) {
	t.Helper()
	cluster := clusterName(number)
	name := groupName(cluster)
	template := capitest.NewInfrastructureTemplate(namespace, name, nil)
	object := capitest.NewCluster(namespace, cluster)
	ledger := protocol.Ledger{Version: protocol.LedgerVersion, Seq: 7, LastReplicas: int32(replicas)}
	md := capitest.NewMachineDeployment(namespace, name, cluster, int32(replicas), capitest.Sized("0", "1000"),
		capitest.Annotated(capacity.MemoryAnnotation, "16Gi"), capitest.Annotated(capacity.CPUAnnotation, "4"),
		capitest.Annotated(v1alpha1.LedgerAnnotation, ledger.Encode()),
		capitest.Annotated(v1alpha1.ClaimedAnnotation, strconv.Itoa(replicas)))
	plane.Create(t, template, object, md)
	labels := map[string]string{
		clusterv1.ClusterNameLabel: cluster, clusterv1.MachineDeploymentNameLabel: name, clusterv1.MachineDeploymentUniqueLabel: "7d4f8c9b6",
	}
	set := &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name + "-7d4f8c9b6", Labels: labels, Finalizers: []string{clusterv1.MachineSetFinalizer},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(md, clusterv1.GroupVersion.WithKind("MachineDeployment"))},
		},
		Spec: clusterv1.MachineSetSpec{
			ClusterName: cluster, Replicas: new(int32(replicas)), Selector: metav1.LabelSelector{MatchLabels: labels},
			Template: *md.Spec.Template.DeepCopy(),
		},
	}
	set.Spec.Template.Labels = labels
	plane.Create(t, set)
	n := new(int32(replicas))
	md.Status.ObservedGeneration, set.Status.ObservedGeneration = md.Generation, set.Generation
	md.Status.Replicas, md.Status.ReadyReplicas, md.Status.AvailableReplicas, md.Status.UpToDateReplicas = n, n, n, n
	set.Status.Replicas, set.Status.ReadyReplicas, set.Status.AvailableReplicas, set.Status.UpToDateReplicas = n, n, n, n
	plane.SetStatus(t, md)
	plane.SetStatus(t, set)
	return object, md, set
}

// recordedSpoke is the cluster that the claims of [settle] were made from.
const recordedSpoke = "3e7d51f0-6c2a-4d0f-9a55-0f6f3b1d2c11"

func machineOf(set *clusterv1.MachineSet, i int) *clusterv1.Machine {
	labels := lo.Assign(set.Spec.Template.Labels, map[string]string{
		clusterv1.MachineSetNameLabel: set.Name, v1alpha1.ClaimLabel: claimID(set, i), v1alpha1.ClaimNameLabel: nodeClaim(i),
		"node.cluster.x-k8s.io/pool": "workers-a",
	})
	machine := &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: set.Namespace, Name: fmt.Sprintf("%s-x%04d", set.Name, i), Labels: labels,
			Annotations: map[string]string{
				v1alpha1.ClaimNameAnnotation: nodeClaim(i), v1alpha1.ClaimHolderAnnotation: "karpenter",
				v1alpha1.ClaimSpokeAnnotation: recordedSpoke, v1alpha1.ClaimedAtAnnotation: "2026-11-20T10:15:31Z",
				"in-place-updates.cluster.x-k8s.io/machine": "",
			},
			Finalizers:      []string{clusterv1.MachineFinalizer},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(set, clusterv1.GroupVersion.WithKind("MachineSet"))},
		},
		Spec: *set.Spec.Template.Spec.DeepCopy(),
	}
	machine.Spec.Bootstrap.ConfigRef = clusterv1.ContractVersionedObjectReference{
		APIGroup: "bootstrap.cluster.x-k8s.io", Kind: "KubeadmConfig", Name: machine.Name,
	}
	machine.Spec.Bootstrap.DataSecretName = &machine.Name
	machine.Spec.InfrastructureRef.Kind, machine.Spec.InfrastructureRef.Name = capitest.InfrastructureMachineKind, machine.Name
	machine.Spec.FailureDomain = "eu-central-1a"
	machine.Spec.ProviderID = "aws:///eu-central-1a/i-0" + claimID(set, i)[:16]
	machine.Spec.ReadinessGates = []clusterv1.MachineReadinessGate{{ConditionType: "APIServerPodHealthy"}}
	machine.Spec.Deletion = clusterv1.MachineDeletionSpec{
		NodeDrainTimeoutSeconds: new(int32(900)), NodeVolumeDetachTimeoutSeconds: new(int32(300)), NodeDeletionTimeoutSeconds: new(int32(10)),
	}
	return machine
}

func claimID(set *clusterv1.MachineSet, i int) string {
	return fmt.Sprintf("%s-%012d", string(set.UID)[:23], i)
}

func nodeClaim(i int) string { return fmt.Sprintf("general-purpose-%05d", i) }

// managed returns the managed fields of a manager. It is used in addition to the managers that
// create the object and write its status.
func managed(manager string, fields ...string) metav1.ManagedFieldsEntry {
	owned := map[string]any{}
	for _, path := range fields {
		at := owned
		for field := range strings.SplitSeq(path, "|") {
			next, ok := at["f:"+field].(map[string]any)
			if !ok {
				next = map[string]any{}
				at["f:"+field] = next
			}
			at = next
		}
	}
	raw, err := json.Marshal(owned)
	if err != nil {
		panic(err) // maps of maps always encode
	}
	return metav1.ManagedFieldsEntry{
		Manager: manager, Operation: metav1.ManagedFieldsOperationApply, APIVersion: clusterv1.GroupVersion.String(),
		Time: new(metav1.Now()), FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(string(raw)),
	}
}

// runMachine creates a running Machine with a Node.
func runMachine(ctx context.Context, machine *clusterv1.Machine) error {
	fields := make([]string, 0, len(machine.Labels)+len(machine.Annotations))
	for key := range machine.Labels {
		fields = append(fields, "metadata|labels|"+key)
	}
	for key := range machine.Annotations {
		fields = append(fields, "metadata|annotations|"+key)
	}
	slices.Sort(fields)
	machine.ManagedFields = []metav1.ManagedFieldsEntry{managed("capi-machineset-metadata", fields...)}
	if err := plane.Client.Create(ctx, machine, ctrlclient.FieldOwner("capi-machineset")); err != nil {
		return err
	}
	condition := func(kind string, status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return metav1.Condition{
			Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: machine.Generation, LastTransitionTime: metav1.Now(),
		}
	}
	machine.Status = clusterv1.MachineStatus{
		Conditions: []metav1.Condition{
			condition(clusterv1.MachineAvailableCondition, metav1.ConditionTrue, clusterv1.MachineAvailableReason, ""),
			condition(clusterv1.MachineReadyCondition, metav1.ConditionTrue, clusterv1.MachineReadyReason, ""),
			condition(clusterv1.MachineUpToDateCondition, metav1.ConditionTrue, clusterv1.MachineUpToDateReason, ""),
			condition(clusterv1.MachineBootstrapConfigReadyCondition, metav1.ConditionTrue, clusterv1.MachineBootstrapConfigReadyReason, ""),
			condition(clusterv1.MachineInfrastructureReadyCondition, metav1.ConditionTrue, clusterv1.MachineInfrastructureReadyReason, ""),
			condition(clusterv1.MachineNodeHealthyCondition, metav1.ConditionTrue, clusterv1.MachineNodeHealthyReason, ""),
			condition(clusterv1.MachineNodeReadyCondition, metav1.ConditionTrue, clusterv1.MachineNodeReadyReason, ""),
			condition(clusterv1.MachineHealthCheckSucceededCondition, metav1.ConditionTrue, clusterv1.MachineHealthCheckSucceededReason, ""),
			condition(clusterv1.MachineUpdatingCondition, metav1.ConditionFalse, clusterv1.MachineNotUpdatingReason, ""),
			condition(clusterv1.MachineDeletingCondition, metav1.ConditionFalse, clusterv1.MachineNotDeletingReason, ""),
			condition(clusterv1.PausedCondition, metav1.ConditionFalse, clusterv1.NotPausedReason, ""),
			condition("APIServerPodHealthy", metav1.ConditionFalse, "ImagePullBackOff",
				"* Pod kube-proxy: back-off pulling image \"registry.example.com/kubernetes/kube-proxy:v1.36.3\""),
		},
		Initialization: clusterv1.MachineInitializationStatus{InfrastructureProvisioned: new(true), BootstrapDataSecretCreated: new(true)},
		NodeRef:        clusterv1.MachineNodeReference{Name: machine.Name + ".eu-central-1.compute.internal"},
		NodeInfo: &corev1.NodeSystemInfo{
			MachineID: "ec2c6e35b8de2f1d6d9a0d5b1b6cf8f1", SystemUUID: "ec2c6e35-b8de-2f1d-6d9a-0d5b1b6cf8f1",
			BootID: "5c1bb0b9-2a62-4a2a-9d35-9c1d0f1f1f6b", KernelVersion: "6.8.0-1031-aws", OSImage: "Ubuntu 24.04.3 LTS",
			ContainerRuntimeVersion: "containerd://2.1.4", KubeletVersion: "v1.36.3", OperatingSystem: "linux", Architecture: "amd64",
		},
		LastUpdated: metav1.Now(),
		Addresses: clusterv1.MachineAddresses{
			{Type: clusterv1.MachineInternalDNS, Address: machine.Name + ".eu-central-1.compute.internal"},
			{Type: clusterv1.MachineInternalIP, Address: "10.0.112.37"},
			{Type: clusterv1.MachineHostName, Address: machine.Name + ".eu-central-1.compute.internal"},
		},
		FailureDomain: "eu-central-1a", Phase: string(clusterv1.MachinePhaseRunning), ObservedGeneration: machine.Generation,
		Deprecated: deprecated(),
	}
	return plane.Client.Status().Update(ctx, machine, &ctrlclient.SubResourceUpdateOptions{
		UpdateOptions: ctrlclient.UpdateOptions{FieldManager: "manager"},
	})
}

// deprecated returns what Cluster API still writes for clients of an earlier version.
//
//nolint:staticcheck // it is there all the same
func deprecated() *clusterv1.MachineDeprecatedStatus {
	var status clusterv1.MachineV1Beta1DeprecatedStatus
	for _, kind := range []clusterv1.ConditionType{
		clusterv1.ReadyV1Beta1Condition, clusterv1.BootstrapReadyV1Beta1Condition, clusterv1.InfrastructureReadyV1Beta1Condition,
		clusterv1.MachineNodeHealthyV1Beta1Condition,
	} {
		status.Conditions = append(status.Conditions,
			clusterv1.Condition{Type: kind, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()})
	}
	return &clusterv1.MachineDeprecatedStatus{V1Beta1: &status}
}

func madeClaim(
	ctx context.Context, cluster *clusterv1.Cluster, md *clusterv1.MachineDeployment, machine *clusterv1.Machine, i int, ended bool,
) (*v1alpha1.MachineClaim, error) {
	id := machine.Labels[v1alpha1.ClaimLabel]
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: md.Namespace, Name: v1alpha1.ObjectName(cluster.Name, id),
			Labels: map[string]string{
				v1alpha1.ClusterLabel: cluster.Name, v1alpha1.NodeGroupLabel: md.Name, v1alpha1.HolderLabel: "karpenter",
			},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: cluster.Name, UID: cluster.UID,
			}},
		},
		Spec: v1alpha1.MachineClaimSpec{
			ClusterName: cluster.Name, ClusterUID: cluster.UID, ClaimID: id, Holder: "karpenter",
			Spoke: machine.Annotations[v1alpha1.ClaimSpokeAnnotation], DisplayName: nodeClaim(i), NodeGroup: md.Name,
			Candidates: append([]string{md.Name}, lo.Times(7, func(n int) string { return fmt.Sprintf("%s-%d", md.Name, n) })...),
		},
	}
	if err := plane.Client.Create(ctx, claim, ctrlclient.FieldOwner(v1alpha1.FieldManager)); err != nil {
		return nil, err
	}
	now := metav1.Now()
	claim.Status = v1alpha1.MachineClaimStatus{
		Phase: v1alpha1.PhaseBound, NodeGroupUID: md.UID, WaitingSince: &now, BoundAt: &now, NodeRegisteredAt: &now,
		Machine: &v1alpha1.MachineReference{
			Name: machine.Name, UID: machine.UID, ProviderID: machine.Spec.ProviderID, NodeName: machine.Status.NodeRef.Name,
		},
	}
	if machine.UID == "" {
		claim.Status.Machine.UID = "0d8e2a31-7b54-4c52-b9b4-3f7c0a9f6f10" // that of a Machine that is gone
	}
	note := func(reason, message string) {
		claim.Status.Reason, claim.Status.Message = reason, message
		claim.Status.History = append(claim.Status.History, v1alpha1.Event{Time: now, Reason: reason, Message: message})
	}
	note(protocol.ReasonWaitingForMachine, "entered in the ledger of "+md.Name)
	note(protocol.ReasonBound, "bound to Machine "+machine.Name)
	note(protocol.ReasonNodeJoined, "Node "+machine.Name+".eu-central-1.compute.internal joined")
	if ended {
		claim.Status.Phase, claim.Status.ReleasedAt, claim.Status.EndedAt = v1alpha1.PhaseEnded, &now, &now
		note(protocol.ReasonReleaseRequested, "the NodeClaim is being deleted")
		note(protocol.ReasonReleased, "its Machine is gone")
	}
	return claim, plane.Client.Status().Update(ctx, claim, &ctrlclient.SubResourceUpdateOptions{
		UpdateOptions: ctrlclient.UpdateOptions{FieldManager: v1alpha1.FieldManager},
	})
}

// jsonSize returns the size of an object as JSON, and the part of it that is managed fields. It
// clears the managed fields.
func jsonSize(t *testing.T, object ctrlclient.Object) (all, managed int) {
	t.Helper()
	whole, err := json.Marshal(object)
	require.NoError(t, err)
	object.SetManagedFields(nil)
	rest, err := json.Marshal(object)
	require.NoError(t, err)
	return len(whole), len(whole) - len(rest)
}

// versions returns the resource versions of all objects that an agent may write.
func versions(t *testing.T, namespace string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, list := range []ctrlclient.ObjectList{&clusterv1.MachineDeploymentList{}, &clusterv1.MachineList{}, &v1alpha1.MachineClaimList{}} {
		var page metav1.PartialObjectMetadataList
		gvk, err := plane.Client.GroupVersionKindFor(list)
		require.NoError(t, err)
		page.SetGroupVersionKind(gvk)
		require.NoError(t, plane.Client.List(t.Context(), &page, ctrlclient.InNamespace(namespace)))
		for i := range page.Items {
			all[gvk.Kind+"/"+page.Items[i].Name] = page.Items[i].ResourceVersion
		}
	}
	return all
}
