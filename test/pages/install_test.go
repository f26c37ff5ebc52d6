package pages_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// Each installation method is followed in the page's order, on API servers with nothing but the
// hub's Cluster API namespace, Cluster API's kubeconfig secret, and cert-manager. No pod runs, but
// everything that a pod would need must exist.
func TestTheInstallationCanBeFollowedInItsOrder(t *testing.T) {
	for _, way := range []struct {
		sections []string
		joined   bool  // the spoke is the hub
		upgrades []int // the steps below "Upgrading" that apply
		others   bool  // others have access
		accounts []account
	}{
		{
			sections: []string{"The agent", "Hub and spoke", "What Karpenter may use"},
			upgrades: []int{0, 1},
			others:   true,
			accounts: []account{
				{"hub", "capi-agent-system", "capi-agent", "team-b", true},
				{"spoke", "karpenter", "karpenter", "", true},
			},
		},
		{
			sections: []string{"The agent", "Joined", "What Karpenter may use"},
			joined:   true,
			upgrades: []int{0, 1},
			accounts: []account{
				{"hub", "capi-agent-system", "capi-agent", "team-b", true},
				{"hub", "karpenter", "karpenter", "team-a", false},
			},
		},
		{
			sections: []string{"The agent", "Hub-hosted", "What Karpenter may use"},
			upgrades: []int{0, 2},
			accounts: []account{
				{"hub", "capi-agent-system", "capi-agent", "team-a", true},
				{"hub", "team-a", "karpenter-production", "team-a", false},
			},
		},
		{
			sections: []string{"Sidecar", "What Karpenter may use"},
			joined:   true,
			accounts: []account{
				{"hub", "karpenter", "karpenter", "team-a", true},
				{"hub", "karpenter", "karpenter", "team-b", false},
			},
		},
	} {
		t.Run(strings.Join(way.sections, "; "), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			page, err := pages.Read(root(t), "docs/install.md")
			require.NoError(t, err)
			for _, section := range way.sections {
				require.NotEmpty(t, page.Script(section), "the commands below %q", section)
			}

			servers := map[string]*server{"hub": start(t, "testdata/cert-manager.yaml")}
			servers["spoke"] = servers["hub"]
			if !way.joined {
				servers["spoke"] = start(t)
			}
			home := t.TempDir()
			do := func(commands string) string {
				t.Helper()
				return runAt(ctx, t, home, servers, page.Script("Before you begin")+commands)
			}
			authority := playHub(ctx, t, servers["hub"].client)
			do(page.Script(way.sections...))
			complete := func() {
				t.Helper()
				for name, server := range servers {
					everythingMountedIsThere(t, name, server.client)
				}
			}
			complete()
			if way.others {
				othersHaveAccess(ctx, t, page, servers["hub"].client, authority, do)
			}

			before := pods(ctx, t, servers)
			do("TAG=" + tag + "\n" + upgrade(t, page, way.upgrades))
			complete()
			require.Equal(t, tagged(before, tag), pods(ctx, t, servers), "only the images' tags have changed")

			for _, account := range way.accounts {
				require.Equal(t, account.may, account.allowed(ctx, t, servers[account.in].client), "%+v", account)
			}
			for _, kind := range []string{"ClusterAPINodeClass", "NodePool"} {
				made := &unstructured.Unstructured{}
				made.SetAPIVersion(map[string]string{"NodePool": "karpenter.sh/v1"}[kind])
				if kind == "ClusterAPINodeClass" {
					made.SetAPIVersion("karpenter.cluster.x-k8s.io/v1alpha1")
				}
				made.SetKind(kind)
				require.NoError(t, servers["spoke"].client.Get(ctx, client.ObjectKey{Name: "default"}, made), kind)
			}
		})
	}
}

// tag is what the command that builds images for an upgrade names them.
const tag = "0a1b2c3"

// upgrade returns the steps of an upgrade; without any, those that the page describes for a sidecar.
func upgrade(t *testing.T, page pages.Page, steps []int) string {
	t.Helper()
	all := page.Steps("Upgrading")
	require.Len(t, all, 3)
	if len(steps) > 0 {
		return strings.Join(lo.Map(steps, func(step, _ int) string { return all[step] }), "")
	}
	commands := page.Script("Sidecar")
	for _, change := range [][2]string{
		{"hub install capi-agent ", "hub upgrade capi-agent "},
		{"hub install karpenter ", "hub upgrade karpenter --set-string image.tag=$TAG "},
		{" --create-namespace", ""},
		{"image: $AGENT_IMAGE:devel\n", "image: $AGENT_IMAGE:$TAG\n"},
	} {
		require.Equal(t, 1, strings.Count(commands, change[0]), change[0])
		commands = strings.Replace(commands, change[0], change[1], 1)
	}
	return commands
}

// pods returns what runs in each container of the Deployments with replicas, by server, namespace and name.
func pods(ctx context.Context, t *testing.T, servers map[string]*server) map[string][]corev1.Container {
	t.Helper()
	found := map[string][]corev1.Container{}
	for name, server := range servers {
		deployments := &appsv1.DeploymentList{}
		require.NoError(t, server.client.List(ctx, deployments))
		for _, d := range deployments.Items {
			if *d.Spec.Replicas > 0 {
				found[name+" "+d.Namespace+"/"+d.Name] = d.Spec.Template.Spec.Containers
			}
		}
	}
	return found
}

// tagged returns the containers with another tag of their images.
func tagged(all map[string][]corev1.Container, tag string) map[string][]corev1.Container {
	return lo.MapValues(all, func(containers []corev1.Container, _ string) []corev1.Container {
		return lo.Map(containers, func(c corev1.Container, _ int) corev1.Container {
			repository, _, _ := strings.Cut(c.Image, ":")
			c.Image = repository + ":" + tag
			return c
		})
	})
}

// othersHaveAccess follows what the page says about the certificates of others, and compares what it shows.
func othersHaveAccess(ctx context.Context, t *testing.T, page pages.Page, hub client.Client, authority *certAuthority, do func(string) string) {
	t.Helper()
	const section = "Access for others"
	steps, shown := page.Steps(section), page.Outputs(section)
	require.Len(t, steps, 4)
	require.Len(t, shown, 2)
	do(steps[0])
	require.Equal(t, shown[0], do(steps[1]), "the policy in force")

	spoke := create(ctx, t, hub, "{apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1, kind: Spoke, "+
		"metadata: {namespace: team-a, name: production}, spec: {}}")
	do(steps[2])
	require.True(t, apierrors.IsNotFound(hub.Get(ctx, client.ObjectKeyFromObject(spoke), spoke)))

	digest := sha256.Sum256(authority.certificate.Raw)
	fingerprint := strings.ReplaceAll(fmt.Sprintf("% X", digest), " ", ":")
	printed := strings.TrimSpace(do(steps[3]))
	require.Equal(t, fingerprint, printed[strings.Index(printed, "=")+1:])
	require.Equal(t, strings.TrimSpace(shown[1]), regexp.MustCompile(`[0-9A-F]{2}(:[0-9A-F]{2}){31}`).ReplaceAllString(printed, "6A:1E:…"))
}

// account is the account of a pod. With a namespace, it must have the rights of an agent there;
// without one, those of a shim in its cluster.
type account struct {
	in        string
	namespace string
	name      string
	inside    string
	may       bool
}

func (a account) allowed(ctx context.Context, t *testing.T, server client.Client) bool {
	t.Helper()
	attributes := &authorizationv1.ResourceAttributes{Namespace: a.inside, Group: "cluster.x-k8s.io", Resource: "machines", Verb: "delete"}
	if a.inside == "" {
		attributes = &authorizationv1.ResourceAttributes{Group: "karpenter.sh", Resource: "nodeclaims", Verb: "create"}
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User:               fmt.Sprintf("system:serviceaccount:%s:%s", a.namespace, a.name),
		ResourceAttributes: attributes,
	}}
	if err := server.Create(ctx, review); err != nil {
		t.Fatal(err)
	}
	return review.Status.Allowed
}

// playHub creates what a hub has beforehand, and issues certificates like cert-manager, of the returned authority.
func playHub(ctx context.Context, t *testing.T, hub client.Client) *certAuthority {
	t.Helper()
	for _, object := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team-a"}},
		&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "production-kubeconfig"},
			Data:       map[string][]byte{"value": []byte("a kubeconfig")},
		},
	} {
		if err := hub.Create(ctx, object); err != nil {
			t.Fatal(err)
		}
	}
	authority := newAuthority(t)
	playCertManager(ctx, t, hub, authority.issue)
	return authority
}

// playCertManager issues certificates like cert-manager, with this content.
func playCertManager(ctx context.Context, t *testing.T, hub client.Client, content func(*unstructured.Unstructured) (map[string][]byte, error)) {
	t.Helper()
	play(ctx, t, "issuing certificates", func(ctx context.Context) error { return issue(ctx, hub, content) })
}

// play repeatedly does the work of a controller, until the returned function is called or the test ends.
func play(ctx context.Context, t *testing.T, what string, do func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			if err := do(ctx); err != nil && ctx.Err() == nil {
				t.Errorf("%s: %v", what, err)
				return true, nil
			}
			return false, nil
		})
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}

// issue creates the secret of each certificate, and marks the certificate as ready.
func issue(ctx context.Context, hub client.Client, content func(*unstructured.Unstructured) (map[string][]byte, error)) error {
	certificates := &unstructured.UnstructuredList{}
	certificates.SetAPIVersion("cert-manager.io/v1")
	certificates.SetKind("CertificateList")
	if err := hub.List(ctx, certificates); err != nil {
		return err
	}
	for _, certificate := range certificates.Items {
		if _, ready := certificate.Object["status"]; ready {
			continue
		}
		name, _, err := unstructured.NestedString(certificate.Object, "spec", "secretName")
		if err != nil {
			return err
		}
		secret := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: certificate.GetNamespace(), Name: name},
			Type:       corev1.SecretTypeTLS,
		}
		if secret.Data, err = content(&certificate); err != nil {
			return err
		}
		if err := hub.Create(ctx, secret); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		before := certificate.DeepCopy()
		certificate.Object["status"] = map[string]any{"conditions": []any{map[string]any{"type": "Ready", "status": "True"}}}
		if err := hub.Patch(ctx, &certificate, client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}

// everythingMountedIsThere verifies that the objects mounted by the pods of every Deployment exist,
// including the files that their flags name, and the accounts of the pods.
func everythingMountedIsThere(t *testing.T, name string, server client.Client) {
	t.Helper()
	deployments := &appsv1.DeploymentList{}
	require.NoError(t, server.List(t.Context(), deployments))
	for _, deployment := range deployments.Items {
		if *deployment.Spec.Replicas == 0 {
			continue
		}
		key := func(name string) client.ObjectKey {
			return client.ObjectKey{Namespace: deployment.Namespace, Name: name}
		}
		pod := deployment.Spec.Template.Spec
		require.NoError(t, server.Get(t.Context(), key(pod.ServiceAccountName), &corev1.ServiceAccount{}))
		for _, volume := range pod.Volumes {
			var files []string
			switch {
			case volume.Secret != nil:
				secret := &corev1.Secret{}
				require.NoError(t, server.Get(t.Context(), key(volume.Secret.SecretName), secret), "in the %s, for %s", name, deployment.Name)
				for file := range secret.Data {
					files = append(files, file)
				}
			case volume.ConfigMap != nil:
				config := &corev1.ConfigMap{}
				require.NoError(t, server.Get(t.Context(), key(volume.ConfigMap.Name), config), "in the %s, for %s", name, deployment.Name)
				for file := range config.Data {
					files = append(files, file)
				}
			default:
				continue
			}
			for _, file := range filesBelow(pod, volume.Name) {
				require.Contains(t, files, file, "of volume %s, in the %s, for %s", volume.Name, name, deployment.Name)
			}
		}
	}
}

// filesBelow returns the files in the mount of a volume that the containers' flags and variables
// name.
func filesBelow(pod corev1.PodSpec, volume string) []string {
	var files []string
	for _, container := range pod.Containers {
		for _, mount := range container.VolumeMounts {
			if mount.Name != volume {
				continue
			}
			values := slices.Clone(container.Args)
			for _, variable := range container.Env {
				values = append(values, "="+variable.Value)
			}
			for _, value := range values {
				if _, value, _ = strings.Cut(value, "="); path.Dir(value) == mount.MountPath {
					files = append(files, path.Base(value))
				}
			}
		}
	}
	return files
}
