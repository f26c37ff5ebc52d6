package kubectl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

// partOf is a label of everything that this project's charts make.
var partOf = client.MatchingLabels{"app.kubernetes.io/part-of": "karpenter-capi"}

// shim is what Karpenter's Deployment says of itself.
type shim struct {
	name                types.NamespacedName
	workload            explain.Workload
	address, serverName string
	plaintext           bool
	cluster             *agentv1alpha1.ClusterRef
	labelKeys           string
	// identity is the secret that the shim keeps its certificate in, in the workload cluster.
	identity types.NamespacedName
	// files are the entries of secrets beside the Deployment that it mounts instead.
	files map[string]entry
	// home is the cluster that the Deployment is in.
	home client.Reader
}

// entry is one entry of a secret.
type entry struct {
	secret types.NamespacedName
	key    string
}

// The flags of the shim that name files.
const (
	certificateFlag = "agent-tls-cert-file"
	keyFlag         = "agent-tls-key-file"
	authorityFlag   = "agent-ca-file"
)

// parseShim reads a Deployment, and returns nil if it does not run the shim.
func parseShim(deployment *appsv1.Deployment, home client.Reader) *shim {
	for i := range deployment.Spec.Template.Spec.Containers {
		container := &deployment.Spec.Template.Spec.Containers[i]
		flags := parseFlags(container.Args)
		if flags["agent-address"] == "" || flags["cluster-name"] == "" {
			continue
		}
		s := &shim{
			name:       client.ObjectKeyFromObject(deployment),
			workload:   workload(deployment),
			address:    flags["agent-address"],
			serverName: flags["agent-server-name"],
			plaintext:  flags["agent-plaintext-loopback"] == "true",
			cluster:    &agentv1alpha1.ClusterRef{Namespace: flags["cluster-namespace"], Name: flags["cluster-name"]},
			labelKeys:  flags["node-label-keys"],
			files:      map[string]entry{},
			home:       home,
		}
		if namespace, name, err := split(flags["agent-identity-secret"]); err == nil {
			s.identity = types.NamespacedName{Namespace: namespace, Name: name}
		}
		for _, flag := range []string{certificateFlag, keyFlag, authorityFlag} {
			if secret := mounted(&deployment.Spec.Template.Spec, container, flags[flag]); secret != "" {
				s.files[flag] = entry{types.NamespacedName{Namespace: deployment.Namespace, Name: secret}, path.Base(flags[flag])}
			}
		}
		return s
	}
	return nil
}

func workload(deployment *appsv1.Deployment) explain.Workload {
	w := explain.Workload{Name: deployment.Namespace + "/" + deployment.Name, Ready: deployment.Status.ReadyReplicas, Wanted: 1}
	if deployment.Spec.Replicas != nil {
		w.Wanted = *deployment.Spec.Replicas
	}
	return w
}

// parseFlags returns the values of a command line's flags. A flag without a value is "true".
func parseFlags(args []string) map[string]string {
	flags := map[string]string{}
	for i, arg := range args {
		name, isFlag := strings.CutPrefix(arg, "-")
		if !isFlag {
			continue
		}
		name, value, given := strings.Cut(strings.TrimPrefix(name, "-"), "=")
		switch {
		case given:
		case i+1 < len(args) && !strings.HasPrefix(args[i+1], "-"):
			value = args[i+1]
		default:
			value = "true"
		}
		flags[name] = value
	}
	return flags
}

// mounted returns the secret that a file of a container comes from, or "".
func mounted(pod *corev1.PodSpec, container *corev1.Container, file string) string {
	if file == "" {
		return ""
	}
	for _, mount := range container.VolumeMounts {
		if path.Dir(file) != path.Clean(mount.MountPath) {
			continue
		}
		for _, volume := range pod.Volumes {
			if volume.Name == mount.Name && volume.Secret != nil {
				return volume.Secret.SecretName
			}
		}
	}
	return ""
}

// host returns the name that the shim expects in the agent's certificate.
func (s *shim) host() string {
	if s.serverName != "" {
		return s.serverName
	}
	if host, _, err := net.SplitHostPort(s.address); err == nil {
		return host
	}
	return ""
}

// findShim looks for Karpenter's Deployment, in the workload cluster and then, if it is given, in
// the management cluster, where Karpenter may run as well.
func (a *Access) findShim(ctx context.Context) (*shim, error) {
	spoke, err := a.Spoke()
	if err != nil {
		return nil, err
	}
	homes := []client.Reader{spoke}
	if a.hasHub() {
		hub, err := a.Hub()
		if err != nil {
			return nil, err
		}
		homes = append(homes, hub)
	}
	var found []*shim
	for _, home := range homes {
		deployments, err := a.deployments(ctx, home)
		if err != nil {
			return nil, err
		}
		for i := range deployments {
			s := parseShim(&deployments[i], home)
			if s != nil && (a.Cluster == "" || a.Cluster == nameOf(s.cluster)) {
				found = append(found, s)
			}
		}
		if len(found) > 0 {
			break
		}
	}
	switch {
	case len(found) == 0:
		return nil, problem(errors.New("there is no Deployment of Karpenter with an agent"),
			"If it has other labels than the chart's, name it: --shim=<namespace>/<name>.",
			"If it runs in the hub, add --hub-kubeconfig or --hub-context.",
			"Or do without it: --agent-address, --tls-dir and --cluster.")
	case len(found) > 1:
		return nil, problem(fmt.Errorf("there are several Deployments of Karpenter, such as %s and %s", found[0].name, found[1].name),
			"Choose one: --shim=<namespace>/<name>, or --cluster=<namespace>/<name>.")
	}
	return found[0], nil
}

func (a *Access) deployments(ctx context.Context, home client.Reader) ([]appsv1.Deployment, error) {
	if a.Shim != "" {
		namespace, name, err := split(a.Shim)
		if err != nil {
			return nil, err
		}
		deployment := &appsv1.Deployment{}
		switch err := home.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, deployment); {
		case apierrors.IsNotFound(err):
			return nil, nil
		case err != nil:
			return nil, spokeProblem(err, "reading Karpenter's Deployment")
		}
		return []appsv1.Deployment{*deployment}, nil
	}
	list := &appsv1.DeploymentList{}
	if err := home.List(ctx, list, partOf); err != nil {
		err = fmt.Errorf("looking for Karpenter's Deployment: %w", err)
		return nil, problem(err, "Name it, if you may read it only there: --shim=<namespace>/<name>.",
			"Or do without it: --agent-address, --tls-dir and --cluster.")
	}
	return list.Items, nil
}

// certificate reads the shim's certificate, its key, and the authorities of the agent.
func (a *Access) certificate(ctx context.Context, s *shim) (certificates.Source, error) {
	var pem certificates.PEM
	var from types.NamespacedName
	if s.identity.Name != "" {
		spoke, err := a.Spoke()
		if err != nil {
			return nil, err
		}
		secret, err := readSecret(ctx, spoke, s.identity)
		if err != nil {
			return nil, err
		}
		from = s.identity
		pem = certificates.PEM{
			Certificate: secret.Data[corev1.TLSCertKey], Key: secret.Data[corev1.TLSPrivateKeyKey], Authorities: secret.Data["ca.crt"],
		}
	} else {
		data := map[string][]byte{}
		secrets := map[types.NamespacedName]*corev1.Secret{}
		for _, flag := range []string{certificateFlag, keyFlag, authorityFlag} {
			file, known := s.files[flag]
			if !known {
				return nil, problem(fmt.Errorf("the Deployment %s does not mount the file of --%s from a secret", s.name, flag),
					"Put its certificate, key and authority into a folder, and name that: --tls-dir.")
			}
			if secrets[file.secret] == nil {
				secret, err := readSecret(ctx, s.home, file.secret)
				if err != nil {
					return nil, err
				}
				secrets[file.secret] = secret
			}
			data[flag], from = secrets[file.secret].Data[file.key], file.secret
		}
		pem = certificates.PEM{Certificate: data[certificateFlag], Key: data[keyFlag], Authorities: data[authorityFlag]}
	}
	held := certificates.NewHeld(nil)
	if err := held.Hold(pem); err != nil {
		return nil, problem(fmt.Errorf("the secret %s: %w", from, err), "See whether Karpenter has got its certificate (docs/operations.md).")
	}
	return held, nil
}

func readSecret(ctx context.Context, reader client.Reader, name types.NamespacedName) (*corev1.Secret, error) {
	secret := &corev1.Secret{}
	err := reader.Get(ctx, name, secret)
	switch {
	case apierrors.IsForbidden(err):
		return nil, problem(fmt.Errorf("reading Karpenter's certificate: %w", err),
			fmt.Sprintf("Ask for permission to get the secret %s in the namespace %s, or use a certificate of your own: --tls-dir.",
				name.Name, name.Namespace))
	case apierrors.IsNotFound(err):
		return nil, problem(fmt.Errorf("karpenter's certificate, the secret %s, does not exist", name),
			"Onboard the cluster (docs/operations.md), or use a certificate of your own: --tls-dir.")
	case err != nil:
		return nil, spokeProblem(err, "reading Karpenter's certificate")
	}
	return secret, nil
}
