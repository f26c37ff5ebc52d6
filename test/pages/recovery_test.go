package pages_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

const skipRemediation = "cluster.x-k8s.io/skip-remediation"

// dayTwo is an installation as docs/install.md describes it, in a hub and a spoke without controllers.
type dayTwo struct {
	page       pages.Page
	values     string // the commands with which the installation's page sets its values
	home       string
	hub, spoke client.Client
	servers    map[string]*server
}

// Two pages are followed in one hub and one spoke, which take longer to start than the commands.
func TestUpgradesAndRecoveryAreFollowedAsThePagesSay(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	installation, err := pages.Read(root(t), "docs/install.md")
	require.NoError(t, err)
	hub, spoke := start(t, "testdata/cert-manager.yaml", filepath.Join(root(t), "bin/capi-core-manifests/crds")), start(t)
	playHub(ctx, t, hub.client)
	d := &dayTwo{
		values: installation.Script("Before you begin"), home: t.TempDir(), hub: hub.client, spoke: spoke.client,
		servers: map[string]*server{"hub": hub, "source": hub, "spoke": spoke},
	}
	d.do(ctx, t, installation.Steps("The agent")[0]+installation.Script("Hub and spoke"))

	for _, part := range []struct {
		page, name string
		follow     func(*dayTwo, context.Context, *testing.T)
	}{
		{"docs/upgrades.md", "a workload cluster is upgraded", (*dayTwo).upgradeWorkers},
		{"docs/upgrades.md", "repair is left to MachineHealthChecks", (*dayTwo).leaveRepair},
		{"docs/disaster-recovery.md", "what only one side has is found", (*dayTwo).findWhatOnlyOneSideHas},
		{"docs/disaster-recovery.md", "a hub is moved", (*dayTwo).moveTheHub},
	} {
		t.Run(part.name, func(t *testing.T) {
			if d.page, err = pages.Read(root(t), part.page); err != nil {
				t.Fatal(err)
			}
			part.follow(d, ctx, t)
		})
	}
}

// do runs commands after those that set the values of the installation.
func (d *dayTwo) do(ctx context.Context, t *testing.T, commands string) string {
	t.Helper()
	return runAt(ctx, t, d.home, d.servers, d.values+commands)
}

// steps returns the steps of a section of the page, and verifies that there are as many as expected.
func (d *dayTwo) steps(t *testing.T, section string, count int) []string {
	t.Helper()
	steps := d.page.Steps(section)
	require.Len(t, steps, count, "the commands below %q", section)
	return steps
}

// machine creates a Machine of the Cluster production.
func (d *dayTwo) machine(ctx context.Context, t *testing.T, name, metadata, spec string) *unstructured.Unstructured {
	t.Helper()
	return create(ctx, t, d.hub, "{apiVersion: cluster.x-k8s.io/v1beta2, kind: Machine, metadata: {namespace: team-a, name: "+name+metadata+"}, "+
		"spec: {clusterName: production, bootstrap: {dataSecretName: b}, "+
		"infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: SimMachine, name: "+name+"}"+spec+"}}")
}

// deployment returns a Deployment of the hub or the spoke.
func deployment(ctx context.Context, t *testing.T, in client.Client, namespace, name string) *appsv1.Deployment {
	t.Helper()
	found := &appsv1.Deployment{}
	require.NoError(t, in.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, found))
	return found
}

// A node group's version and template are changed by one command, and its progress is seen in both clusters.
func (d *dayTwo) upgradeWorkers(ctx context.Context, t *testing.T) {
	t.Helper()
	steps := d.steps(t, "Upgrade a workload cluster", 2)
	workers := machineDeployment(ctx, t, d.hub, "production", "workers", "")
	d.machine(ctx, t, "workers-old", ", labels: {agent.karpenter.cluster.x-k8s.io/claim-name: default-x2v4d}", ", version: v1.35.0")
	drifted := create(ctx, t, d.spoke, "{apiVersion: karpenter.sh/v1, kind: NodeClaim, metadata: {name: default-x2v4d}, "+
		"spec: {requirements: [], nodeClassRef: {group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: default}}}")
	drifted.Object["status"] = map[string]any{"conditions": []any{map[string]any{
		"type": "Drifted", "status": "True", "reason": "MachineNotUpToDate", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
	}}}
	require.NoError(t, d.spoke.Status().Update(ctx, drifted))

	d.do(ctx, t, steps[0])
	before := workers.DeepCopy()
	require.NoError(t, d.hub.Get(ctx, client.ObjectKeyFromObject(workers), workers))
	for path, value := range map[string]string{"version": "v1.36.3", "infrastructureRef.name": "workers-v1-36-3"} {
		require.NoError(t, unstructured.SetNestedField(before.Object, value, slices.Concat(
			[]string{"spec", "template", "spec"}, strings.Split(path, "."))...))
	}
	require.Equal(t, before.Object["spec"], workers.Object["spec"], "nothing else has changed")

	shown := d.do(ctx, t, steps[1])
	nodeClaims, machines, found := strings.Cut(shown, "\nNAME ")
	require.True(t, found, shown)
	require.Regexp(t, `^NAME .* DRIFTED *\ndefault-x2v4d .* True *$`, nodeClaims)
	require.Regexp(t, ` VERSION +CLAIM-NAME\nworkers-old .* v1\.35\.0 +default-x2v4d\n$`, machines)
}

// What an older agent has left on Machines is removed, and what others have set is kept.
func (d *dayTwo) leaveRepair(ctx context.Context, t *testing.T) {
	t.Helper()
	d.machine(ctx, t, "claimed", ", annotations: {"+skipRemediation+": agent.karpenter.cluster.x-k8s.io, example.com/rack: r1}", "")
	d.machine(ctx, t, "kept", ", annotations: {"+skipRemediation+": a-person}", "")

	d.do(ctx, t, d.steps(t, "Unhealthy nodes", 1)[0])
	for name, annotations := range map[string]map[string]string{
		"claimed": {"example.com/rack": "r1"}, "kept": {skipRemediation: "a-person"},
	} {
		machine := &unstructured.Unstructured{}
		machine.SetGroupVersionKind(machineKind)
		require.NoError(t, d.hub.Get(ctx, client.ObjectKey{Namespace: "team-a", Name: name}, machine))
		require.Equal(t, annotations, machine.GetAnnotations(), name)
		require.NoError(t, d.hub.Delete(ctx, machine))
	}
}

// After a restore, one side is older than the other. The page's commands find what only one of them
// has.
func (d *dayTwo) findWhatOnlyOneSideHas(ctx context.Context, t *testing.T) {
	t.Helper()
	d.do(ctx, t, d.steps(t, "", 1)[0])
	require.Zero(t, *deployment(ctx, t, d.hub, "capi-agent-system", "capi-agent").Spec.Replicas)

	for name, id := range map[string]string{"both": "sim://both", "new": "sim://only-a-node", "joining": ""} {
		create(ctx, t, d.spoke, "{apiVersion: v1, kind: Node, metadata: {name: "+name+"}, spec: {providerID: '"+id+"'}}")
	}
	for name, id := range map[string]string{"both": ", providerID: 'sim://both'", "gone": ", providerID: 'sim://only-a-machine'", "booting": ""} {
		d.machine(ctx, t, name, "", id)
	}
	known := create(ctx, t, d.spoke, "{apiVersion: karpenter.sh/v1, kind: NodeClaim, metadata: {name: a}, "+
		"spec: {requirements: [], nodeClassRef: {group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: default}}}")
	for _, claim := range []struct{ cluster, id, phase string }{
		{"production", string(known.GetUID()), "Bound"},
		{"production", "lost", "Bound"},
		{"production", "over", "Ended"},
		{"production", "waiting", "Pending"},
		{"staging", "another-cluster", "Bound"},
	} {
		made := create(ctx, t, d.hub, "{apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1, kind: MachineClaim, "+
			"metadata: {name: "+claim.cluster+"."+claim.id+", namespace: team-a}, "+
			"spec: {clusterName: "+claim.cluster+", claimID: "+claim.id+", holder: karpenter}}")
		made.Object["status"] = map[string]any{"phase": claim.phase, "machine": map[string]any{"name": "machine-of-" + claim.id, "uid": "u"}}
		require.NoError(t, d.hub.Status().Update(ctx, made))
	}

	require.Equal(t, []string{"sim://only-a-node"}, strings.Fields(d.do(ctx, t, d.steps(t, "Restoring the hub", 1)[0])))
	require.Equal(t, []string{"lost", "machine-of-lost"}, strings.Fields(d.do(ctx, t, d.steps(t, "Restoring a spoke", 1)[0])))
}

// The commands before and after clusterctl's.
func (d *dayTwo) moveTheHub(ctx context.Context, t *testing.T) {
	t.Helper()
	steps := d.steps(t, "Moving to another hub", 5)
	joined, waiting := d.machine(ctx, t, "joined", "", ""), d.machine(ctx, t, "without-a-node", "", "")
	require.NoError(t, unstructured.SetNestedField(joined.Object, "joined", "status", "nodeRef", "name"))
	require.NoError(t, d.hub.Status().Update(ctx, joined))
	listed := strings.Fields(d.do(ctx, t, steps[0]))
	require.Contains(t, listed, waiting.GetName())
	require.NotContains(t, listed, joined.GetName())

	bootstrap := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "my-bootstrap"}}
	require.NoError(t, d.hub.Create(ctx, bootstrap))
	d.do(ctx, t, steps[1])
	require.NoError(t, d.hub.Get(ctx, client.ObjectKeyFromObject(bootstrap), bootstrap))
	require.Equal(t, map[string]string{"clusterctl.cluster.x-k8s.io/move": ""}, bootstrap.Labels)

	before := deployment(ctx, t, d.spoke, "karpenter", "karpenter").Spec.Template.Spec.Containers[0]
	d.do(ctx, t, steps[2])
	after := deployment(ctx, t, d.spoke, "karpenter", "karpenter").Spec.Template.Spec.Containers[0]
	was, is := fmt.Sprint(before.Args, before.Env), fmt.Sprint(after.Args, after.Env)
	require.Contains(t, was, "agent.example.com:8443")
	require.Equal(t, strings.ReplaceAll(was, "agent.example.com:8443", "agent.target.example.com:8443"), is, "all other values are kept")

	cluster := create(ctx, t, d.hub, "{apiVersion: cluster.x-k8s.io/v1beta2, kind: Cluster, metadata: {namespace: team-a, name: production}, "+
		"spec: {paused: true, controlPlaneRef: {apiGroup: controlplane.cluster.x-k8s.io, kind: KamajiControlPlane, name: production}}}")
	d.do(ctx, t, steps[4])
	require.NoError(t, d.hub.Get(ctx, client.ObjectKeyFromObject(cluster), cluster))
	paused, _, err := unstructured.NestedBool(cluster.Object, "spec", "paused")
	require.NoError(t, err)
	require.False(t, paused)

	d.do(ctx, t, steps[3])
	err = d.hub.Get(ctx, client.ObjectKey{Namespace: "capi-agent-system", Name: "capi-agent"}, &appsv1.Deployment{})
	require.True(t, apierrors.IsNotFound(err), "%v", err)
	require.NotEmpty(t, list(ctx, t, d.hub, claimKind), "the MachineClaims are kept")
}

// create creates the object of a manifest.
func create(ctx context.Context, t *testing.T, server client.Client, manifest string) *unstructured.Unstructured {
	t.Helper()
	object := &unstructured.Unstructured{}
	if err := yaml.NewYAMLOrJSONDecoder(strings.NewReader(manifest), 4096).Decode(object); err != nil {
		t.Fatal(err)
	}
	if err := server.Create(ctx, object); err != nil {
		t.Fatal(err)
	}
	return object
}
